#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "shm/flag.h"
#include "tests/sim/network_impl.h"

namespace mk::sim {

namespace {

fabric::Bytes bytes_of(std::uint64_t number) {
  fabric::Bytes bytes(sizeof number);
  std::memcpy(bytes.data(), &number, sizeof number);
  return bytes;
}

std::uint64_t number_of(std::span<const std::byte> bytes) {
  std::uint64_t number = 0;
  if (bytes.size() == sizeof number) std::memcpy(&number, bytes.data(), sizeof number);
  return number;
}

}  // namespace

/// Destroying it deregisters.
class SimLocalRegion final : public fabric::LocalRegion {
 public:
  SimLocalRegion(Network::Impl& network, SimEndpoint& endpoint, std::shared_ptr<SimRegion> memory)
      : region(std::move(memory)), network_(network), endpoint_(endpoint) {
    ++endpoint_.local_regions;
  }
  ~SimLocalRegion() override {
    --endpoint_.local_regions;
    network_.regions.erase(region->number);
    if (region->uses != 0 && !endpoint_.dead) {
      network_.world.violate(
          fmt::format("node {} deregistered memory (key {}) that {} writes in flight read",
                      endpoint_.node, region->number, region->uses));
    }
    region->memory.address = nullptr;
  }
  fabric::Bytes key() const override { return bytes_of(region->number); }

  const std::shared_ptr<SimRegion> region;

 private:
  Network::Impl& network_;
  SimEndpoint& endpoint_;
};

class SimRemoteRegion final : public fabric::RemoteRegion {
 public:
  SimRemoteRegion(Network::Impl& network, SimEndpoint& endpoint, std::uint64_t key)
      : number(key), network_(network), endpoint_(endpoint) {
    ++endpoint_.remote_regions;
  }
  ~SimRemoteRegion() override {
    --endpoint_.remote_regions;
    if (*uses != 0 && !endpoint_.dead) {
      network_.world.violate(
          fmt::format("node {} released an imported region (key {}) that {} writes in flight name",
                      endpoint_.node, number, *uses));
    }
  }

  const std::uint64_t number;
  const std::shared_ptr<std::uint32_t> uses = std::make_shared<std::uint32_t>(0);

 private:
  Network::Impl& network_;
  SimEndpoint& endpoint_;
};

SimEndpoint::SimEndpoint(Network::Impl& network, NodeId on_node, std::uint32_t on_rail,
                         std::function<void()> wake)
    : node(on_node),
      rail(on_rail),
      number(network.next_number++),
      network_(network),
      world_(network.world),
      wake_(std::move(wake)) {
  capabilities_.name = "sim";
  capabilities_.contract = network.plan.contract;
  capabilities_.link_depth = network.plan.link_depth;
  network.endpoints.emplace(number, this);
}

SimEndpoint::~SimEndpoint() { network_.endpoints.erase(number); }

fabric::Bytes SimEndpoint::address() const { return bytes_of(number); }

Result<std::unique_ptr<fabric::LocalRegion>> SimEndpoint::register_memory(
    const fabric::MemoryDescriptor& memory) {
  auto region = std::make_shared<SimRegion>();
  region->number = network_.next_number++;
  region->node = node;
  region->memory = memory;
  region->file = file_of(memory.fd);
  network_.regions.emplace(region->number, region);
  return std::make_unique<SimLocalRegion>(network_, *this, region);
}

Result<fabric::LinkId> SimEndpoint::connect(std::span<const std::byte> address,
                                            const std::string& peer_name) {
  const SimEndpoint* target = network_.endpoint(number_of(address));
  if (target == nullptr || target->dead) {
    return fail(ErrorCode::kUnavailable, "nobody is at the address of {}", peer_name);
  }
  if (std::max(flaps_until_ns, target->flaps_until_ns) > world_.now()) {
    return fail(ErrorCode::kUnavailable, "the port to {} is down", peer_name);
  }
  auto link = std::make_unique<SimLink>();
  link->id = next_link_++;
  link->target = target->number;
  link->target_node = target->node;
  const fabric::LinkId id = link->id;
  links_.emplace(id, std::move(link));
  world_.trace([&] { return fmt::format("node {} link {} up to {}", node, id, peer_name); });
  return id;
}

void SimEndpoint::disconnect(fabric::LinkId id) {
  const auto found = links_.find(id);
  if (found == links_.end()) return;
  SimLink& link = *found->second;
  for (const auto& flight : std::exchange(link.flights, {})) {
    if (flight->ended) continue;
    end(flight, {fabric::Event::Kind::kFailed, id, flight->write.cookie, 0, ErrorCode::kLinkDown});
  }
  links_.erase(found);
  wake_();
}

Result<std::unique_ptr<fabric::RemoteRegion>> SimEndpoint::import_region(
    fabric::LinkId link, std::span<const std::byte> key) {
  if (find(link) == nullptr) return fail(ErrorCode::kLinkDown, "the link is gone");
  return std::make_unique<SimRemoteRegion>(network_, *this, number_of(key));
}

std::string SimEndpoint::link_reason(fabric::LinkId id) const {
  const auto found = links_.find(id);
  return found == links_.end() ? "given up" : found->second->reason;
}

SimLink* SimEndpoint::find(fabric::LinkId id) {
  const auto found = links_.find(id);
  return found == links_.end() ? nullptr : found->second.get();
}

std::size_t SimEndpoint::post(fabric::LinkId id, std::span<const fabric::Write> writes) {
  if (writes.size() > shm::kBatchMax) {
    world_.violate(fmt::format("node {} posted {} writes at once", node, writes.size()));
  }
  Random& random = world_.random;
  SimLink* link = find(id);
  if (link == nullptr || !link->up) {
    for (const fabric::Write& write : writes) {
      reported_.push_back(
          {{fabric::Event::Kind::kFailed, id, write.cookie, 0, ErrorCode::kLinkDown}, nullptr});
    }
    wake_();
    return writes.size();
  }
  std::size_t taken = std::min<std::size_t>(
      writes.size(), network_.plan.link_depth -
                         std::min<std::size_t>(network_.plan.link_depth, link->flights.size()));
  const bool storms = world_.now() < storms_until_ns;
  if (taken != 0 && random.chance(storms ? 950'000 : network_.plan.short_posts)) {
    taken = random.below(storms ? 1 : taken);
  }
  for (std::size_t i = 0; i < taken; ++i) launch(*link, writes[i]);
  return taken;
}

void SimEndpoint::launch(SimLink& link, const fabric::Write& write) {
  Random& random = world_.random;
  const NetworkPlan& plan = network_.plan;
  const auto flight = std::make_shared<Flight>();
  flight->write = write;
  flight->target = link.target_node;
  link.flights.push_back(flight);
  if (write.bytes != 0) {
    flight->src = static_cast<const SimLocalRegion*>(write.src)->region;
    ++flight->src->uses;
    const auto* dst = static_cast<const SimRemoteRegion*>(write.dst);
    flight->dst = dst->number;
    flight->dst_uses = dst->uses;
    ++*dst->uses;
    if (write.src_offset + write.bytes > flight->src->memory.bytes) {
      world_.violate(
          fmt::format("node {} posted a write that reads {} bytes at {} of a source of "
                      "{} bytes",
                      node, write.bytes, write.src_offset, flight->src->memory.bytes));
    }
  }
  const bool ordered = plan.contract == fabric::DeliveryContract::kOrdered;
  if (ordered && write.flags != nullptr) {
    const auto* flags = static_cast<const SimRemoteRegion*>(write.flags);
    flight->flags = flags->number;
    flight->flags_uses = flags->uses;
    ++*flags->uses;
  }
  world_.trace([&] {
    return fmt::format("node {} link {} posts {} bytes to key {}+{}, flag {} epoch {}, imm {:#x}",
                       node, link.id, write.bytes, flight->dst, write.dst_offset, write.flag_index,
                       write.epoch, write.immediate);
  });

  // The payload, in one piece or two, in any order.
  std::uint64_t landed_ns = world_.now();
  if (write.bytes != 0) {
    const std::uint64_t cut = random.chance(500'000) ? random.below(write.bytes) : 0;
    const std::pair<std::uint64_t, std::uint64_t> pieces[] = {{0, cut}, {cut, write.bytes}};
    for (const auto& [begin, end] : pieces) {
      if (begin == end) continue;
      const std::uint64_t when = world_.now() + network_.delay();
      landed_ns = std::max(landed_ns, when);
      world_.at(when, self_, [=, this, begin = begin, end = end](SimEndpoint*&) {
        if (!flight->ended) land(flight, begin, end);
      });
    }
  }
  // Its arrival, and the end of it as we hear of it.
  std::uint64_t shown_ns = landed_ns + network_.delay();
  if (ordered) shown_ns = link.flags.arrival(landed_ns, shown_ns - landed_ns);
  const bool late = random.chance(plan.late_arrivals);
  const std::uint64_t done_ns =
      late ? random.between(landed_ns, shown_ns) : shown_ns + network_.delay();
  if (ordered) {
    world_.at(shown_ns, self_, [=, this](SimEndpoint*&) {
      if (!flight->ended || flight->completed) show_flag(flight);
    });
  } else {
    world_.at(shown_ns, self_, [=, this, target = link.target](SimEndpoint*&) {
      SimEndpoint* receiver = network_.endpoint(target);
      if (receiver == nullptr || (flight->ended && !flight->completed)) return;
      receiver->report({fabric::Event::Kind::kArrival, 0, 0, write.immediate, ErrorCode::kOk});
    });
  }
  if (random.chance(plan.lost)) {
    network_.watch.on_trouble(node, link.target_node, plan.write_timeout_ns);
    world_.at(world_.now() + plan.write_timeout_ns, self_, [=, this, id = link.id](SimEndpoint*&) {
      SimLink* stuck = find(id);
      if (stuck != nullptr && !flight->ended) {
        fail_link(*stuck, ErrorCode::kTimeout, "no progress");
      }
    });
    return;
  }
  const fabric::Event done{fabric::Event::Kind::kCompleted, link.id, write.cookie, 0,
                           ErrorCode::kOk};
  world_.at(done_ns, self_, [=, this](SimEndpoint*&) {
    if (flight->ended) return;
    if (SimLink* current = find(done.link)) std::erase(current->flights, flight);
    flight->completed = true;
    end(flight, done);
    wake_();
  });
  if (random.chance(plan.duplicates)) {
    world_.at(done_ns + network_.delay(), self_, [=, this](SimEndpoint*&) { report(done); });
  }
}

/// Bytes [begin, end) of the payload become visible at the receiver.
void SimEndpoint::land(const std::shared_ptr<Flight>& flight, std::uint64_t begin,
                       std::uint64_t end) {
  const fabric::Write& write = flight->write;
  const auto found = network_.regions.find(flight->dst);
  if (found == network_.regions.end()) return reach_nothing(flight, flight->dst);
  const SimRegion& dst = *found->second;
  world_.trace([&] {
    return fmt::format("  lands: bytes {} to {} of cookie {:#x}, epoch {}, key {}+{}", begin, end,
                       write.cookie, write.epoch, flight->dst, write.dst_offset);
  });
  if (write.dst_offset + end > dst.memory.bytes) {
    world_.violate(
        fmt::format("a write of node {} would have put {} bytes at {} of a buffer of {} "
                    "bytes",
                    node, end, write.dst_offset, dst.memory.bytes));
    return;
  }
  if (flight->src->memory.address == nullptr) return;  // reported when it went
  std::memcpy(dst.memory.address + write.dst_offset + begin,
              flight->src->memory.address + write.src_offset + begin, end - begin);
  network_.watch.on_data(
      {dst.file, dst.memory.fd_offset + write.dst_offset + begin, end - begin, write.epoch});
}

void SimEndpoint::show_flag(const std::shared_ptr<Flight>& flight) {
  const fabric::Write& write = flight->write;
  const auto found = network_.regions.find(flight->flags);
  if (found == network_.regions.end()) {
    // The flag of a write that was completed before may come late, to nobody.
    if (!flight->completed) reach_nothing(flight, flight->flags);
    return;
  }
  const SimRegion& flags = *found->second;
  if ((std::uint64_t{write.flag_index} + 1) * sizeof(std::uint32_t) > flags.memory.bytes) {
    world_.violate(fmt::format("node {} wrote flag {} of {} bytes of flags", node, write.flag_index,
                               flags.memory.bytes));
    return;
  }
  shm::flag_publish(reinterpret_cast<std::uint32_t*>(flags.memory.address) + write.flag_index,
                    write.epoch);
  network_.watch.on_flag(flags.file);
}

/// What the key names is not registered any more: the link ends in an error, with all who use it.
void SimEndpoint::reach_nothing(const std::shared_ptr<Flight>& flight, std::uint64_t key) {
  if (!network_.watch.may_have_lost_touch(node, flight->target)) {
    world_.violate(
        fmt::format("a write of node {} reached memory of node {} (key {}) that is not registered "
                    "any more",
                    node, flight->target, key));
  }
  for (const auto& [id, link] : links_) {
    if (std::ranges::find(link->flights, flight) == link->flights.end()) continue;
    network_.watch.on_trouble(node, flight->target, 0);
    return fail_link(*link, ErrorCode::kLinkDown, "remote access error");
  }
}

void SimEndpoint::end(const std::shared_ptr<Flight>& flight, const fabric::Event& event) {
  flight->ended = true;
  reported_.push_back({event, flight});
}

void SimEndpoint::let_go(Flight& flight) {
  if (flight.src != nullptr) --flight.src->uses;
  if (flight.dst_uses != nullptr) --*flight.dst_uses;
  if (flight.flags_uses != nullptr) --*flight.flags_uses;
}

void SimEndpoint::report(const fabric::Event& event) {
  reported_.push_back({event, nullptr});
  wake_();
}

std::size_t SimEndpoint::poll(std::span<fabric::Event> events) {
  std::size_t count = 0;
  while (count < events.size() && !reported_.empty()) {
    Reported next = std::move(reported_.front());
    reported_.pop_front();
    if (next.flight != nullptr) let_go(*next.flight);
    events[count++] = next.event;
  }
  return count;
}

void SimEndpoint::fail_link(SimLink& link, ErrorCode code, const std::string& reason) {
  if (!link.up || dead) return;
  link.up = false;
  link.reason = reason;
  world_.trace([&] { return fmt::format("node {} link {} fails: {}", node, link.id, reason); });
  Random& random = world_.random;
  const fabric::Event down{fabric::Event::Kind::kLinkDown, link.id, 0, 0, code};
  const bool first = random.chance(500'000);
  if (first) report(down);
  // Those that are still under way at the end never land; the order of the failures means nothing.
  std::vector<std::shared_ptr<Flight>> flights = std::exchange(link.flights, {});
  while (!flights.empty()) {
    const std::size_t at = random.below(flights.size());
    const std::shared_ptr<Flight> flight = flights[at];
    flights.erase(flights.begin() + static_cast<std::ptrdiff_t>(at));
    if (flight->ended) continue;
    end(flight, {fabric::Event::Kind::kFailed, link.id, flight->write.cookie, 0, code});
  }
  if (!first) report(down);
  wake_();
}

void SimEndpoint::fail_links_to(std::uint64_t target, const std::string& reason) {
  for (const auto& [id, link] : links_) {
    if (link->target == target) fail_link(*link, ErrorCode::kLinkDown, reason);
  }
}

void SimEndpoint::fail_links_to_node(NodeId target, const std::string& reason) {
  for (const auto& [id, link] : links_) {
    if (link->target_node == target) fail_link(*link, ErrorCode::kLinkDown, reason);
  }
}

void SimEndpoint::kill() {
  dead = true;
  for (const auto& [id, link] : links_) {
    for (const auto& flight : link->flights) flight->ended = true;
    link->up = false;
  }
  // The others notice that nobody is there any more, each in its own time.
  for (const auto& [other_number, other] : network_.endpoints) {
    if (other == this || other->dead) continue;
    const std::uint64_t notices_ns =
        world_.now() + world_.random.scaled(kMicrosecond, 500 * kMillisecond);
    network_.watch.on_trouble(other->node, node, 500 * kMillisecond);
    world_.at(notices_ns, other->self_, [gone = number](SimEndpoint*& live) {
      live->fail_links_to(gone, "the endpoint at the other end is gone");
    });
  }
}

std::size_t SimEndpoint::flight_count() const {
  std::size_t count = 0;
  for (const auto& [id, link] : links_) count += link->flights.size();
  return count;
}

}  // namespace mk::sim
