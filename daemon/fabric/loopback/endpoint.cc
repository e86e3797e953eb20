#include "daemon/fabric/loopback/endpoint.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "daemon/fabric/loopback/link.h"
#include "daemon/fabric/loopback/service.h"
#include "shm/host/memfd.h"

namespace mk::fabric {
namespace loopback {
namespace {

Capabilities capabilities_of(const EndpointConfig& config, const LoopbackOptions& options) {
  Capabilities own{"loopback", DeliveryContract::kOrdered, options.link_depth, true};
  own.link_bytes_per_second = config.link_model.bytes_per_second;
  return own;
}

class LoopbackEndpoint final : public Endpoint {
 public:
  LoopbackEndpoint(const EndpointConfig& config, LoopbackOptions options, const Token& id,
                   std::shared_ptr<RegionTable> regions, std::unique_ptr<Service> service)
      : config_(config),
        options_(std::move(options)),
        id_(id),
        regions_(std::move(regions)),
        service_(std::move(service)),
        capabilities_(capabilities_of(config, options_)),
        gpu_(options_.load_gpu_driver) {
    ProcessRegistry::instance().add(id_, regions_);
  }
  ~LoopbackEndpoint() override {
    ProcessRegistry::instance().remove(id_);
    service_.reset();  // its thread calls back into the links
    gpu_.stop();       // what it copies to may go with the links
    links_.each(0, [](Link& link) {
      if (!link.peer_gone) link.queue.fail_all(ErrorCode::kLinkDown, true);
    });
  }

  const Capabilities& capabilities() const override { return capabilities_; }
  Bytes address() const override;
  Result<std::unique_ptr<LocalRegion>> register_memory(const MemoryDescriptor& memory) override;
  Result<LinkId> connect(std::span<const std::byte> address, const std::string& peer_name) override;
  void disconnect(LinkId link) override;
  Result<std::unique_ptr<RemoteRegion>> import_region(LinkId link,
                                                      std::span<const std::byte> key) override;
  std::string link_reason(LinkId link) const override;
  std::string gpu_path() const override {
    return gpu_.slots() == 0 ? std::string() : "copied by the GPUs";
  }

  std::size_t post(LinkId link, std::span<const Write> writes) override;
  std::size_t poll(std::span<Event> events) override;
  std::optional<std::uint64_t> next_due_ns() const override;
  std::uint64_t completed_on(LinkId id) const override {
    const Link* const link = links_.find(id);
    return link != nullptr ? link->queue.reported() : 0;
  }
  bool shown(LinkId id, std::uint64_t mark) const override {
    const Link* const link = links_.find(id);
    return link == nullptr || link->queue.shown() >= mark;
  }

 private:
  std::uint64_t now_ns() const {
    if (options_.now_ns) return options_.now_ns();
    return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
  }
  std::chrono::steady_clock::time_point deadline() const {
    return std::chrono::steady_clock::now() + std::chrono::nanoseconds(config_.connect_timeout_ns);
  }
  Result<std::unique_ptr<LocalRegion>> register_gpu_memory(const MemoryDescriptor& memory,
                                                           const Token& token);
  Result<std::unique_ptr<RemoteRegion>> imported(std::shared_ptr<Target> target);
  Result<Connection> call(std::span<const std::byte> address, const Address& peer,
                          const std::string& peer_name);
  Result<std::shared_ptr<Target>> ask_for_region(Link& link, const Key& key);
  void give_up(Link& link, const Error& error);
  std::size_t poll_link(Link& link, std::uint64_t now, std::uint64_t& budget,
                        std::span<Event> events);

  const EndpointConfig config_;
  const LoopbackOptions options_;
  const Token id_;
  const std::shared_ptr<RegionTable> regions_;
  std::unique_ptr<Service> service_;
  const Capabilities capabilities_;
  GpuCopier gpu_;
  LinkTable<Link> links_;
  std::vector<std::weak_ptr<Target>> gpu_targets_;  ///< control thread: peers' regions on GPUs
  OrphanQueue orphans_;                             ///< proxy thread
  std::uint32_t first_link_ = 0;                    ///< proxy thread: who is polled first, in turn
};

Bytes LoopbackEndpoint::address() const {
  Address address;
  address.endpoint = id_;
  return to_blob(address);
}

Result<std::unique_ptr<LocalRegion>> LoopbackEndpoint::register_memory(
    const MemoryDescriptor& memory) {
  if ((memory.address == nullptr && !memory.device) || memory.bytes == 0) {
    return fail(ErrorCode::kInvalidArgument, "cannot register an empty memory range");
  }
  if (memory.fd >= 0) {
    MK_RETURN_IF_ERROR(shm::require_seals(memory.fd, F_SEAL_SHRINK, "the memory to register"));
    MK_ASSIGN_OR_RETURN(const std::uint64_t file,
                        shm::file_bytes(memory.fd, "the memory to register"));
    if (memory.bytes > file || memory.fd_offset > file - memory.bytes) {
      return fail(ErrorCode::kInvalidArgument,
                  "cannot register bytes {}..+{} of a memory file of {} bytes", memory.fd_offset,
                  memory.bytes, file);
    }
  }
  MK_ASSIGN_OR_RETURN(const Token token, make_token());
  if (memory.device) return register_gpu_memory(memory, token);
  return std::make_unique<LoopbackLocalRegion>(regions_, regions_->add(memory, token), id_);
}

Result<std::unique_ptr<LocalRegion>> LoopbackEndpoint::register_gpu_memory(
    const MemoryDescriptor& memory, const Token& token) {
  auto driver = gpu_.driver();
  if (!driver) {
    return fail(ErrorCode::kUnsupported,
                "the loopback fabric copies GPU memory by this daemon's CUDA driver: {}",
                driver.error().message);
  }
  MK_ASSIGN_OR_RETURN(const int device, (*driver)->device_of(memory.device->device));
  auto region = std::make_shared<Region>();
  region->memory = memory;
  MK_ASSIGN_OR_RETURN(region->view, gpu::View::open(*driver, device, *memory.device));
  MK_ASSIGN_OR_RETURN(region->gpu_slot, gpu_.use(device));
  // The device may be new to what was imported before. What cannot be opened (another job's, whose
  // owner is gone) is a failure of the writes to it, if there are any.
  for (const auto& weak : gpu_targets_) {
    if (const auto target = weak.lock()) (void)target->open_for(gpu_, region->gpu_slot);
  }
  return std::make_unique<LoopbackLocalRegion>(regions_, regions_->add(std::move(region), token),
                                               id_);
}

Result<LinkId> LoopbackEndpoint::connect(std::span<const std::byte> address,
                                         const std::string& peer_name) {
  const auto peer = from_blob<Address>(address);
  if (!peer) {
    return fail(ErrorCode::kInvalidArgument,
                "cannot connect to {}: its address is not one of the loopback fabric; is its "
                "daemon configured for the "
                "same fabric, and of the same version?",
                peer_name);
  }
  links_.sweep();
  auto made = std::make_unique<Link>(config_.link_model, options_.link_depth, gpu_);
  made->peer = peer->endpoint;
  made->peer_name = peer_name;
  const auto on_gone = [link = made.get()] {
    link->peer_gone.store(true, std::memory_order_release);
  };
  if (options_.share_process_memory)
    made->within_process = ProcessRegistry::instance().watch(peer->endpoint, on_gone);
  if (made->within_process == nullptr) {
    MK_ASSIGN_OR_RETURN(made->connection, call(address, *peer, peer_name));
  }
  MK_ASSIGN_OR_RETURN(Link* const link, links_.add(std::move(made)));
  if (link->connection) link->watch = service_->watch(link->connection->fd(), on_gone);
  links_.publish(*link);
  return link->id;
}

Result<Connection> LoopbackEndpoint::call(std::span<const std::byte> address, const Address& peer,
                                          const std::string& peer_name) {
  const auto until = deadline();
  auto socket =
      shm::FrameSocket::connect(socket_name(peer.endpoint),
                                std::chrono::milliseconds(config_.connect_timeout_ns / 1'000'000));
  if (!socket) {
    return fail(socket.error().code,
                "cannot connect to {}: {}. The loopback fabric joins daemons of one host and "
                "network namespace; is that "
                "daemon still running?",
                peer_name, socket.error().message);
  }
  Connection connection(std::move(*socket));
  MK_ASSIGN_OR_RETURN(const shm::PeerCredentials credentials, connection.credentials());
  if (credentials.uid != ::geteuid()) {
    return fail(ErrorCode::kPermission,
                "cannot connect to {}: its daemon runs as user {}, this one as {}", peer_name,
                credentials.uid, ::geteuid());
  }
  if (const auto welcome = connection.ask(Message::kHello, address, Message::kWelcome, until);
      !welcome) {
    return fail(welcome.error().code, "cannot connect to {} (process {}): {}", peer_name,
                credentials.pid, welcome.error().message);
  }
  return connection;
}

void LoopbackEndpoint::disconnect(LinkId id) {
  Link* const link = links_.owned(id);
  if (link == nullptr) return;
  link->within_process.reset();
  if (link->connection) {
    service_->unwatch(link->watch);
    link->connection->release();  // the link itself goes when the proxy has let go of it
  }
  link->closing.store(true, std::memory_order_release);
}

Result<std::unique_ptr<RemoteRegion>> LoopbackEndpoint::import_region(
    LinkId id, std::span<const std::byte> bytes) {
  Link* const link = links_.owned(id);
  if (link == nullptr) return fail(ErrorCode::kNotFound, "there is no link {}", id);
  const auto key = from_blob<Key>(bytes);
  if (!key || !same_token(key->endpoint, link->peer)) {
    return fail(ErrorCode::kInvalidArgument, "the key of {} bytes is not one of a region of {}",
                bytes.size(), link->peer_name);
  }
  if (!link->up()) {
    return fail(ErrorCode::kLinkDown, "cannot get a region of {}, its link is down: {}",
                link->peer_name, link_reason(id));
  }
  if (options_.share_process_memory) {
    if (const auto table = ProcessRegistry::instance().find(key->endpoint)) {
      auto region = table->find(*key);
      if (!region)
        return fail(region.error().code, "{}: {}", link->peer_name, region.error().message);
      return imported(std::make_shared<Target>(std::move(*region)));
    }
  }
  MK_ASSIGN_OR_RETURN(auto target, ask_for_region(*link, *key));
  return imported(std::move(target));
}

Result<std::unique_ptr<RemoteRegion>> LoopbackEndpoint::imported(std::shared_ptr<Target> target) {
  if (target->on_gpu()) {
    // One of this endpoint's GPUs will do: the others may be other jobs'.
    Status opened;
    for (std::uint32_t slot = 0; slot < gpu_.slots(); ++slot) {
      const Status now = target->open_for(gpu_, slot);
      opened = slot == 0 || now ? now : opened;
    }
    if (!opened) return propagate(opened);
    std::erase_if(gpu_targets_, [](const auto& weak) { return weak.expired(); });
    gpu_targets_.push_back(target);
  }
  return std::make_unique<LoopbackRemoteRegion>(std::move(target));
}

Result<std::shared_ptr<Target>> LoopbackEndpoint::ask_for_region(Link& link, const Key& key) {
  if (!link.connection) {
    return fail(ErrorCode::kLinkDown, "cannot get a region of {}: its endpoint is gone",
                link.peer_name);
  }
  const Bytes question = to_blob(key);
  auto frame = link.connection->ask(Message::kGetRegion, question, Message::kRegion, deadline());
  const auto begins_with = [](const Bytes& bytes, const Bytes& front) {
    return bytes.size() >= front.size() && std::equal(front.begin(), front.end(), bytes.begin());
  };
  if (frame && frame->payload.size() == question.size() + sizeof(gpu::MemoryKey) &&
      begins_with(frame->payload, question) && frame->fds.empty()) {
    gpu::MemoryKey device;
    std::memcpy(&device, frame->payload.data() + question.size(), sizeof device);
    return std::make_shared<Target>(device, key.bytes);
  }
  if (frame && frame->payload != question) {
    frame = fail(ErrorCode::kProtocol, "it answered with another region than {}", key.region);
  } else if (frame && frame->fds.size() != 1) {
    frame = fail(ErrorCode::kProtocol, "it sent {} descriptors for one region", frame->fds.size());
  } else if (frame) {
    return map_target(frame->fds[0].get(), key);
  } else if (link.connection->usable()) {
    return fail(frame.error().code, "cannot get a region of {}: {}", link.peer_name,
                frame.error().message);
  }
  give_up(link, frame.error());
  return fail(frame.error().code, "cannot get a region of {}, its link is down now: {}",
              link.peer_name, frame.error().message);
}

void LoopbackEndpoint::give_up(Link& link, const Error& error) {
  // An answer that comes late or is wrong must never meet another question. A peer that hangs may
  // cost the control thread one time-out, not one for every region.
  service_->unwatch(link.watch);  // it would take our own hanging up for the peer's
  link.connection->close();
  if (error.code == ErrorCode::kUnavailable) {
    link.peer_gone.store(true, std::memory_order_release);
    return;
  }
  link.given_up_reason =
      fmt::format("{} did not answer as it should: {}", link.peer_name, error.message);
  link.given_up.store(true, std::memory_order_release);
}

std::string LoopbackEndpoint::link_reason(LinkId id) const {
  const Link* const link = links_.owned(id);
  if (link == nullptr || link->up()) return {};
  if (link->given_up.load(std::memory_order_relaxed)) return link->given_up_reason;
  return fmt::format("{} closed its loopback endpoint: its daemon ended or died", link->peer_name);
}

std::size_t LoopbackEndpoint::post(LinkId id, std::span<const Write> writes) {
  Link* const link = links_.find(id);
  if (link == nullptr) return orphans_.take(id, writes);
  const std::uint64_t now = now_ns();
  std::size_t taken = 0;
  while (taken < writes.size() && link->queue.post(writes[taken], now)) ++taken;
  return taken;
}

std::size_t LoopbackEndpoint::poll_link(Link& link, std::uint64_t now, std::uint64_t& budget,
                                        std::span<Event> events) {
  const bool closing = link.closing.load(std::memory_order_acquire);
  const bool gone = link.peer_gone.load(std::memory_order_acquire);
  const bool given_up = link.given_up.load(std::memory_order_acquire);
  if (closing || gone || given_up) link.queue.fail_all(ErrorCode::kLinkDown, !gone);
  link.queue.advance(now, budget);
  std::size_t count = link.queue.report(link.id, now, events);
  if ((gone || given_up) && !closing && !link.down_reported && count < events.size()) {
    link.down_reported = true;
    events[count++] = {Event::Kind::kLinkDown, link.id, 0, 0, ErrorCode::kLinkDown};
  }
  if (closing && link.queue.empty()) links_.release(link);
  return count;
}

std::size_t LoopbackEndpoint::poll(std::span<Event> events) {
  std::size_t count = orphans_.report(events);
  const std::uint64_t now = now_ns();
  std::uint64_t budget = kPollBytesMax;
  first_link_ = links_.each(first_link_, [&](Link& link) {
    count += poll_link(link, now, budget, events.subspan(count));
  });
  gpu_.mark();
  return count;
}

std::optional<std::uint64_t> LoopbackEndpoint::next_due_ns() const {
  std::optional<std::uint64_t> due;
  links_.each(0, [&](const Link& link) {
    const auto next = link.queue.next_due_ns();
    if (next && (!due || *next < *due)) due = next;
  });
  return due;
}

}  // namespace
}  // namespace loopback

Result<std::unique_ptr<Endpoint>> make_loopback_endpoint(const EndpointConfig& config,
                                                         LoopbackOptions options) {
  if (config.link_model.bytes_per_second < 0 || options.link_depth == 0) {
    return fail(ErrorCode::kInvalidArgument,
                "the loopback link's bandwidth is {} bytes/s and its depth {}: neither may be "
                "negative, and the depth not zero",
                config.link_model.bytes_per_second, options.link_depth);
  }
  MK_ASSIGN_OR_RETURN(const Token id, make_token());
  auto regions = std::make_shared<loopback::RegionTable>();
  MK_ASSIGN_OR_RETURN(auto service, loopback::Service::start(id, regions, config.notice));
  return std::make_unique<loopback::LoopbackEndpoint>(config, std::move(options), id,
                                                      std::move(regions), std::move(service));
}

}  // namespace mk::fabric
