#include "daemon/fabric/striped/endpoint.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <utility>

#include "daemon/fabric/link_table.h"
#include "daemon/fabric/striped/pack.h"
#include "shm/limits.h"

namespace mk::fabric {
namespace {

class StripedLocalRegion final : public LocalRegion {
 public:
  explicit StripedLocalRegion(std::vector<std::unique_ptr<LocalRegion>> stripes)
      : stripes_(std::move(stripes)) {}
  Bytes key() const override {
    std::vector<Bytes> keys;
    for (const auto& stripe : stripes_) keys.push_back(stripe->key());
    return pack(keys);
  }
  const LocalRegion* at(std::uint32_t stripe) const { return stripes_[stripe].get(); }

 private:
  std::vector<std::unique_ptr<LocalRegion>> stripes_;
};

class StripedRemoteRegion final : public RemoteRegion {
 public:
  explicit StripedRemoteRegion(std::vector<std::unique_ptr<RemoteRegion>> stripes)
      : stripes_(std::move(stripes)) {}
  const RemoteRegion* at(std::uint32_t stripe) const { return stripes_[stripe].get(); }

 private:
  std::vector<std::unique_ptr<RemoteRegion>> stripes_;
};

/// A link of each stripe, as one. Down when any of them is.
struct StripedLink : LinkBase {
  std::array<LinkId, kStripesMax> ids{};
  bool down = false;  ///< proxy thread
};

class StripedEndpoint final : public Endpoint {
 public:
  explicit StripedEndpoint(std::vector<std::unique_ptr<Endpoint>> stripes)
      : stripes_(std::move(stripes)), own_ids_(stripes_.size()) {
    for (auto& ids : own_ids_) {
      for (auto& id : ids) id.store(kNoLink, std::memory_order_relaxed);
    }
  }
  Status open();

  const Capabilities& capabilities() const override { return capabilities_; }
  Bytes address() const override {
    std::vector<Bytes> addresses;
    for (const auto& stripe : stripes_) addresses.push_back(stripe->address());
    return pack(addresses);
  }
  Result<std::unique_ptr<LocalRegion>> register_memory(const MemoryDescriptor& memory) override;
  Bytes personal(Bytes address, PeerNumber peer) const override {
    auto addresses = unpack(address, stripes_.size());
    if (!addresses) return address;
    for (std::size_t i = 0; i < stripes_.size(); ++i)
      (*addresses)[i] = stripes_[i]->personal(std::move((*addresses)[i]), peer);
    return pack(*addresses);
  }
  Result<LinkId> connect(std::span<const std::byte> address,
                         const std::string& peer_name) override {
    return connect_peer(kAnyPeer, address, peer_name);
  }
  Result<LinkId> connect_peer(PeerNumber peer, std::span<const std::byte> address,
                              const std::string& peer_name) override;
  void disconnect(LinkId link) override;
  Result<std::unique_ptr<RemoteRegion>> import_region(LinkId link,
                                                      std::span<const std::byte> key) override;
  std::string link_reason(LinkId link) const override;
  std::string gpu_path() const override { return stripes_.front()->gpu_path(); }

  std::size_t post(LinkId link, std::span<const Write> writes) override;
  std::size_t poll(std::span<Event> events) override;
  bool flush(const LocalRegion& region, std::uint64_t cookie) override;
  std::optional<std::uint64_t> next_due_ns() const override;

 private:
  std::uint32_t count() const { return static_cast<std::uint32_t>(stripes_.size()); }
  std::size_t post_run(StripedLink& link, std::uint32_t stripe, std::span<const Write> writes);
  std::size_t poll_stripe(std::uint32_t stripe, std::span<Event> events);
  bool take_flushed(Event& event);
  void let_go();

  const std::vector<std::unique_ptr<Endpoint>> stripes_;
  Capabilities capabilities_;
  LinkTable<StripedLink> links_;
  static constexpr LinkId kNoLink = std::numeric_limits<LinkId>::max();
  /// By stripe and its link's number: ours. The proxy may see that a stripe's link is down before
  /// ours exists: `connect_peer` looks for that.
  std::vector<std::array<std::atomic<LinkId>, kLinksMax>> own_ids_;
  struct Flushing {
    std::uint64_t number = 0;  ///< what the stripes know it by
    std::uint64_t cookie = 0;  ///< what the caller does
    std::uint32_t left = 0;    ///< stripes that have not answered
    bool whole = true;         ///< all took it; else the caller has been told that it never was
    ErrorCode code = ErrorCode::kOk;
  };
  std::vector<Flushing> flushing_;  ///< proxy thread
  std::uint64_t flushes_ = 0;       ///< proxy thread
  OrphanQueue orphans_;             ///< proxy thread
  std::uint32_t first_stripe_ = 0;  ///< proxy thread: who is polled first, in turn
};

Status StripedEndpoint::open() {
  capabilities_ = stripes_.front()->capabilities();
  for (const auto& stripe : stripes_) {
    const Capabilities& each = stripe->capabilities();
    if (each.contract != capabilities_.contract || each.name != capabilities_.name) {
      return fail(ErrorCode::kInvalidArgument, "{} and {} cannot be one rail's NICs",
                  capabilities_.name, each.name);
    }
    capabilities_.link_depth = std::min(capabilities_.link_depth, each.link_depth);
    capabilities_.arrivals_named = capabilities_.arrivals_named && each.arrivals_named;
    capabilities_.device_memory = capabilities_.device_memory && each.device_memory;
    capabilities_.gpu_direct = capabilities_.gpu_direct && each.gpu_direct;
    if (!each.gpu_direct) capabilities_.gpu_direct_why = each.gpu_direct_why;
    if (stripe == stripes_.front()) continue;
    capabilities_.device += "+" + each.device;
    capabilities_.explanation += "; and " + each.explanation;
  }
  capabilities_.link_depth *= count();
  capabilities_.link_bytes_per_second *= count();
  if (address().size() > kAddressBytesMax) {
    return fail(ErrorCode::kLimitExceeded,
                "{} NICs have addresses of {} bytes together: {} at most", count(),
                address().size(), kAddressBytesMax);
  }
  return {};
}

Result<std::unique_ptr<LocalRegion>> StripedEndpoint::register_memory(
    const MemoryDescriptor& memory) {
  std::vector<std::unique_ptr<LocalRegion>> regions;
  for (const auto& stripe : stripes_) {
    MK_ASSIGN_OR_RETURN(auto region, stripe->register_memory(memory));
    regions.push_back(std::move(region));
  }
  auto whole = std::make_unique<StripedLocalRegion>(std::move(regions));
  if (whole->key().size() > kKeyBytesMax) {
    return fail(ErrorCode::kLimitExceeded,
                "{} bytes of memory on {} NICs make a key of more than {} "
                "bytes: register less at once",
                memory.bytes, count(), kKeyBytesMax);
  }
  return whole;
}

Result<LinkId> StripedEndpoint::connect_peer(PeerNumber peer, std::span<const std::byte> bytes,
                                             const std::string& peer_name) {
  links_.sweep();
  const auto addresses = unpack(bytes, stripes_.size());
  if (!addresses) {
    return fail(ErrorCode::kInvalidArgument,
                "cannot connect to {}: its address is not one of a rail of {} NICs; configure as "
                "many for the same rail of all nodes",
                peer_name, count());
  }
  auto made = std::make_unique<StripedLink>();
  for (std::uint32_t i = 0; i < count(); ++i) {
    auto id = stripes_[i]->connect_peer(peer, (*addresses)[i], peer_name);
    if (!id) {
      for (std::uint32_t back = 0; back < i; ++back) stripes_[back]->disconnect(made->ids[back]);
      return propagate(id);
    }
    made->ids[i] = *id;
  }
  const std::array<LinkId, kStripesMax> ids = made->ids;
  auto added = links_.add(std::move(made));
  if (!added) {
    for (std::uint32_t i = 0; i < count(); ++i) stripes_[i]->disconnect(ids[i]);
    return propagate(added);
  }
  for (std::uint32_t i = 0; i < count(); ++i)
    own_ids_[i][link_slot(ids[i])].store((*added)->id, std::memory_order_release);
  links_.publish(**added);
  const LinkId id = (*added)->id;
  if (const std::string reason = link_reason(id); !reason.empty()) {
    disconnect(id);
    return fail(ErrorCode::kUnavailable, "{}", reason);
  }
  return id;
}

void StripedEndpoint::disconnect(LinkId id) {
  StripedLink* const link = links_.owned(id);
  if (link == nullptr) return;
  for (std::uint32_t i = 0; i < count(); ++i) stripes_[i]->disconnect(link->ids[i]);
  link->closing.store(true, std::memory_order_release);
}

Result<std::unique_ptr<RemoteRegion>> StripedEndpoint::import_region(
    LinkId id, std::span<const std::byte> bytes) {
  const StripedLink* const link = links_.owned(id);
  if (link == nullptr) return fail(ErrorCode::kNotFound, "there is no link {}", id);
  const auto keys = unpack(bytes, stripes_.size());
  if (!keys) {
    return fail(ErrorCode::kInvalidArgument,
                "the key of {} bytes is not one of a region on {} NICs", bytes.size(), count());
  }
  std::vector<std::unique_ptr<RemoteRegion>> regions;
  for (std::uint32_t i = 0; i < count(); ++i) {
    MK_ASSIGN_OR_RETURN(auto region, stripes_[i]->import_region(link->ids[i], (*keys)[i]));
    regions.push_back(std::move(region));
  }
  return std::make_unique<StripedRemoteRegion>(std::move(regions));
}

std::string StripedEndpoint::link_reason(LinkId id) const {
  const StripedLink* const link = links_.owned(id);
  if (link == nullptr) return {};
  for (std::uint32_t i = 0; i < count(); ++i) {
    std::string reason = stripes_[i]->link_reason(link->ids[i]);
    if (!reason.empty()) return reason;
  }
  return {};
}

// -- data path --------------------------------------------------------------------------------

std::size_t StripedEndpoint::post(LinkId id, std::span<const Write> writes) {
  StripedLink* const link = links_.find(id);
  if (link == nullptr || link->down) return orphans_.take(id, writes);
  // Neighbours of one stripe stay one submission. The first that is not taken ends it: what is
  // taken is taken from the front.
  std::size_t taken = 0;
  while (taken < writes.size()) {
    const std::uint32_t stripe = stripe_of(writes[taken].flag_index, count());
    std::size_t end = taken + 1;
    while (end < writes.size() && stripe_of(writes[end].flag_index, count()) == stripe) ++end;
    const std::size_t now = post_run(*link, stripe, writes.subspan(taken, end - taken));
    taken += now;
    if (taken < end) break;
  }
  return taken;
}

std::size_t StripedEndpoint::post_run(StripedLink& link, std::uint32_t stripe,
                                      std::span<const Write> writes) {
  std::array<Write, shm::kBatchMax> own;
  const std::size_t now = std::min(writes.size(), own.size());
  for (std::size_t i = 0; i < now; ++i) {
    Write& write = own[i] = writes[i];
    if (write.src != nullptr)
      write.src = static_cast<const StripedLocalRegion*>(write.src)->at(stripe);
    if (write.dst != nullptr)
      write.dst = static_cast<const StripedRemoteRegion*>(write.dst)->at(stripe);
    if (write.flags != nullptr)
      write.flags = static_cast<const StripedRemoteRegion*>(write.flags)->at(stripe);
  }
  return stripes_[stripe]->post(link.ids[stripe], {own.data(), now});
}

std::size_t StripedEndpoint::poll_stripe(std::uint32_t stripe, std::span<Event> events) {
  const std::size_t count = stripes_[stripe]->poll(events);
  std::size_t kept = 0;
  for (std::size_t i = 0; i < count; ++i) {
    Event event = events[i];
    if (event.kind == Event::Kind::kFlushed) {
      if (!take_flushed(event)) continue;
    } else if (event.kind != Event::Kind::kArrival) {
      event.link = own_ids_[stripe][link_slot(event.link)].load(std::memory_order_acquire);
      if (event.kind == Event::Kind::kLinkDown) {
        StripedLink* const link = links_.find(event.link);
        if (link == nullptr || std::exchange(link->down, true)) continue;
      }
    }
    events[kept++] = event;
  }
  return kept;
}

/// Every NIC may have written into the region: each flushes, and then it is over.
bool StripedEndpoint::flush(const LocalRegion& region, std::uint64_t cookie) {
  Flushing one{.number = ++flushes_, .cookie = cookie};
  for (; one.left < count(); ++one.left) {
    const LocalRegion& own = *static_cast<const StripedLocalRegion&>(region).at(one.left);
    one.whole = stripes_[one.left]->flush(own, one.number);
    if (!one.whole) break;
  }
  if (one.left > 0) flushing_.push_back(one);
  return one.whole;
}

/// Whether that was the last stripe's; then it is the caller's event.
bool StripedEndpoint::take_flushed(Event& event) {
  const auto found = std::find_if(flushing_.begin(), flushing_.end(),
                                  [&](const Flushing& one) { return one.number == event.cookie; });
  if (found == flushing_.end()) return false;
  if (event.code != ErrorCode::kOk) found->code = event.code;
  if (--found->left > 0) return false;
  const bool whole = found->whole;
  event.cookie = found->cookie;
  event.code = found->code;
  flushing_.erase(found);
  return whole;
}

/// Links that were given up: their stripes report what is outstanding; ours need not be seen again.
void StripedEndpoint::let_go() {
  links_.each(0, [&](StripedLink& link) {
    if (link.closing.load(std::memory_order_acquire)) links_.release(link);
  });
}

std::size_t StripedEndpoint::poll(std::span<Event> events) {
  let_go();
  std::size_t count_events = orphans_.report(events);
  first_stripe_ = (first_stripe_ + 1) % count();
  for (std::uint32_t i = 0; i < count(); ++i) {
    if (count_events == events.size()) break;
    count_events += poll_stripe((first_stripe_ + i) % count(), events.subspan(count_events));
  }
  return count_events;
}

std::optional<std::uint64_t> StripedEndpoint::next_due_ns() const {
  std::optional<std::uint64_t> first;
  for (const auto& stripe : stripes_) {
    const auto due = stripe->next_due_ns();
    if (due) first = std::min(first.value_or(std::numeric_limits<std::uint64_t>::max()), *due);
  }
  return first;
}

}  // namespace

Result<std::unique_ptr<Endpoint>> make_striped_endpoint(
    std::vector<std::unique_ptr<Endpoint>> stripes) {
  if (stripes.size() < 2 || stripes.size() > kStripesMax) {
    return fail(ErrorCode::kInvalidArgument, "a rail has 2 to {} NICs striped, not {}", kStripesMax,
                stripes.size());
  }
  auto endpoint = std::make_unique<StripedEndpoint>(std::move(stripes));
  MK_RETURN_IF_ERROR(endpoint->open());
  return endpoint;
}

}  // namespace mk::fabric
