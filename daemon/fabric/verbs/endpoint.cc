#include "daemon/fabric/verbs/endpoint.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <utility>

#include "daemon/fabric/verbs/directory.h"
#include "daemon/fabric/verbs/link.h"
#include "daemon/fabric/verbs/open_port.h"
#include "daemon/fabric/verbs/service.h"

namespace mk::fabric {
namespace verbs {
namespace {

/// Writes in flight on one link, where the device's queues are long enough.
constexpr std::uint32_t kLinkDepth = 256;
constexpr std::uint32_t kPkeyMask = 0x7fff;  ///< the key without the membership bit
/// Flushes that are refused at once; more wait for the next poll.
constexpr std::size_t kHopelessMax = 128;

/// Writes in flight on one link, so that neither a send queue nor the completion queue that a
/// link's queues share ever overflows.
Result<std::uint32_t> depth_of(const Device& device, const VerbsOptions& options) {
  const std::uint32_t depth =
      std::min({kLinkDepth, device.work_requests_max() / kRequestsPerWrite,
                device.completions_max() / (kRequestsPerWrite * options.queues)});
  if (depth >= shm::kBatchMax) return depth;
  return fail(ErrorCode::kUnsupported, "RDMA port {} has queues of {} work requests only",
              device.name(), device.work_requests_max());
}

/// The smallest pieces, but not below `piece_bytes_max` rounded down, of which `bytes` are so few
/// that a key names them all.
std::uint32_t piece_shift_of(std::uint64_t bytes, std::uint64_t piece_bytes_max) {
  auto shift = static_cast<std::uint32_t>(std::bit_width(piece_bytes_max) - 1);
  while ((bytes - 1) >> shift >= kPiecesMax) ++shift;
  return shift;
}

Status check_options(const VerbsOptions& options) {
  if (options.arrival != "flag" && options.arrival != "immediate") {
    return fail(ErrorCode::kInvalidArgument,
                "fabric.verbs.arrival is \"{}\": it is \"flag\" or \"immediate\"", options.arrival);
  }
  if (options.queues == 0 || options.queues > kQueuesMax) {
    return fail(ErrorCode::kInvalidArgument, "fabric.verbs.queues is {}: it is 1 to {}",
                options.queues, kQueuesMax);
  }
  if (options.timeout > 31 || options.retries > 7 || options.rnr_retries > 7 ||
      options.service_level > 15 || options.traffic_class > 255) {
    return fail(ErrorCode::kInvalidArgument,
                "fabric.verbs: timeout is 0 to 31, retries and rnr_retries 0 to 7, service_level 0 "
                "to 15, traffic_class 0 to 255");
  }
  return {};
}

Status check_peer(const Address& own, const Address& peer) {
  const auto kind = [](std::uint32_t layer) {
    return layer == IBV_LINK_LAYER_ETHERNET ? "Ethernet (RoCE)" : "InfiniBand";
  };
  if (peer.link_layer != own.link_layer) {
    return fail(ErrorCode::kInvalidArgument, "its port is {}, this one {}", kind(peer.link_layer),
                kind(own.link_layer));
  }
  if (((peer.pkey ^ own.pkey) & kPkeyMask) != 0) {
    return fail(ErrorCode::kInvalidArgument,
                "it is in partition {:#06x}, this one in {:#06x}: set fabric.verbs.pkey alike",
                peer.pkey, own.pkey);
  }
  if (peer.unordered != own.unordered || peer.mtu < IBV_MTU_256 || peer.mtu > IBV_MTU_4096) {
    return fail(ErrorCode::kInvalidArgument, "fabric.verbs.arrival is not the same there and here");
  }
  return {};
}

class VerbsEndpoint final : public Endpoint {
 public:
  VerbsEndpoint(const EndpointConfig& config, const Token& id, std::shared_ptr<OpenPort> port)
      : config_(config), id_(id), ports_(std::move(port)) {
    hopeless_.reserve(kHopelessMax);
  }
  Status open();

  const Capabilities& capabilities() const override { return capabilities_; }
  Bytes address() const override { return to_blob(service_->address_for(kAnyPeer)); }
  Bytes personal(Bytes address, PeerNumber peer) const override {
    auto own = from_blob<Address>(address);
    if (!own) return address;
    own->pass = passes_.of(peer);
    return to_blob(*own);
  }
  Result<std::unique_ptr<LocalRegion>> register_memory(const MemoryDescriptor& memory) override;
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

  std::size_t post(LinkId link, std::span<const Write> writes) override;
  std::size_t poll(std::span<Event> events) override;
  bool flush(const LocalRegion& region, std::uint64_t cookie) override;

 private:
  static std::uint64_t now_ns() {
    return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
  }
  Service::Deadline deadline() const {
    return std::chrono::steady_clock::now() + std::chrono::nanoseconds(config_.connect_timeout_ns);
  }
  Result<std::shared_ptr<OpenPort>> reopen();
  Result<LinkQueues> make_queues(const OpenPort& port) const;
  /// Where the accepting ends are.
  Result<Address> join(const OpenPort& port, const Address& own, const Remote& remote,
                       std::uint64_t number, const LinkQueues& queues);
  Result<LinkId> add_link(const OpenPort& port, const Remote& peer, const std::string& peer_name,
                          std::uint64_t number, LinkQueues queues);
  void give_up(const Remote& peer, std::uint64_t number) {
    Datagram given_up;
    given_up.kind = DatagramKind::kDisconnect;
    given_up.number = number;
    service_->tell(peer, given_up);
  }
  std::size_t poll_flushes(std::span<Event> events);
  std::size_t poll_links(std::span<Event> events);
  std::size_t poll_link(Link& link, std::uint64_t now, std::span<Event> events);

  // Declared in the order in which they may be closed backwards: the service's thread uses all that
  // stands above it, and calls into the links.
  const EndpointConfig config_;
  const Token id_;
  Submission submission_ = Submission::kAuto;
  Capabilities capabilities_;
  Directory directory_;
  Passes passes_;
  PortPlace ports_;
  PortEntry known_;             ///< of the first opening
  std::uint32_t openings_ = 1;  ///< service thread
  LinkTable<Link> links_;
  std::unique_ptr<Service> service_;
  OrphanQueue orphans_;                  ///< proxy thread
  std::vector<std::uint64_t> hopeless_;  ///< proxy thread: flushes of memory that a lost port had
  std::uint32_t first_link_ = 0;         ///< proxy thread: who is polled first, in turn
  bool arrivals_first_ = false;          ///< proxy thread
};

Status VerbsEndpoint::open() {
  MK_RETURN_IF_ERROR(passes_.draw());
  MK_ASSIGN_OR_RETURN(submission_, submission_of(config_.verbs.submission));
  const Device& device = *ports_.get()->device();
  MK_ASSIGN_OR_RETURN(capabilities_.link_depth, depth_of(device, config_.verbs));
  known_ = device.entry();
  capabilities_.name = "verbs";
  capabilities_.device = device.name();
  capabilities_.contract = config_.verbs.arrival == "immediate" ? DeliveryContract::kUnordered
                                                                : DeliveryContract::kOrdered;
  capabilities_.arrivals_named = capabilities_.contract == DeliveryContract::kUnordered;
  capabilities_.gpu_direct = config_.verbs.gpu_direct;
  capabilities_.explanation = device.explanation();
  MK_ASSIGN_OR_RETURN(service_, Service::start({.ports = ports_,
                                                .directory = directory_,
                                                .passes = passes_,
                                                .reopen = [this] { return reopen(); },
                                                .notice = config_.notice}));
  return {};
}

Result<std::shared_ptr<OpenPort>> VerbsEndpoint::reopen() {
  // The same port, whatever the rules would choose among those that are there now, and whatever it
  // is called.
  EndpointConfig same = config_;
  same.verbs.devices = {present_name(read_ports(), known_)};
  same.nic_why = "opened again";
  MK_ASSIGN_OR_RETURN(auto port,
                      OpenPort::open(same, id_, openings_ + 1, ports_.address().version + 1));
  MK_ASSIGN_OR_RETURN(const std::uint32_t depth, depth_of(*port->device(), config_.verbs));
  if (depth < capabilities_.link_depth) {
    return fail(ErrorCode::kUnsupported,
                "RDMA port {} has shorter queues than it had: restart mkerneld",
                port->device()->name());
  }
  ++openings_;
  return port;
}

Result<std::unique_ptr<LocalRegion>> VerbsEndpoint::register_memory(
    const MemoryDescriptor& memory) {
  if (memory.address == nullptr || memory.bytes == 0) {
    return fail(ErrorCode::kInvalidArgument, "cannot register an empty memory range");
  }
  MK_ASSIGN_OR_RETURN(const auto port, ports_.need());
  const Device& device = *port->device();
  unsigned access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
  // A flag's write may then never pass the data's on its way over PCIe, whatever the data's may do
  // among themselves. The kernel ignores the wish where the device can't.
  if (config_.verbs.relaxed_ordering && !memory.strictly_ordered)
    access |= IBV_ACCESS_RELAXED_ORDERING;
  if (memory.direct != GpuWindow::kNone) {
    // Of us alone: the queues that peers write by let nobody read.
    access |= IBV_ACCESS_REMOTE_READ;
    MK_RETURN_IF_ERROR(port->make_flusher());
  }
  Key key;
  key.endpoint = id_;
  MK_ASSIGN_OR_RETURN(key.region, make_token());
  key.address = reinterpret_cast<std::uint64_t>(memory.address);
  key.bytes = memory.bytes;
  key.piece_shift = piece_shift_of(memory.bytes, config_.verbs.registration_bytes_max);
  MK_ASSIGN_OR_RETURN(auto pieces, register_pieces(device.domain(), device.name(), memory,
                                                   key.piece_shift, access));
  std::vector<std::uint32_t> local_keys;
  for (const RegionHandle& piece : pieces) {
    key.rkeys[local_keys.size()] = piece->rkey;
    local_keys.push_back(piece->lkey);
  }
  MK_RETURN_IF_ERROR(port->keys()->add(key, std::move(pieces)));
  return std::make_unique<VerbsLocalRegion>(
      key, std::move(local_keys), port->number(),
      std::make_unique<Registration>(port->keys(), key.region));
}

Result<LinkQueues> VerbsEndpoint::make_queues(const OpenPort& port) const {
  const std::uint32_t requests = kRequestsPerWrite * capabilities_.link_depth;
  const std::uint32_t completions = config_.verbs.queues * requests;
  const Device& device = *port.device();
  LinkQueues queues;
  queues.device = port.device();
  queues.completions.reset(
      ::ibv_create_cq(device.context(), static_cast<int>(completions), nullptr, nullptr, 0));
  if (!queues.completions)
    return fail_verb(errno, "RDMA port {} gives no completion queue", device.name());
  for (std::uint32_t i = 0; i < config_.verbs.queues; ++i) {
    MK_ASSIGN_OR_RETURN(
        SendingQueue queue,
        make_sending_queue(device.domain(), queues.completions.get(), requests, submission_));
    queues.sending.push_back(std::move(queue));
  }
  return queues;
}

Result<Address> VerbsEndpoint::join(const OpenPort& port, const Address& own, const Remote& remote,
                                    std::uint64_t number, const LinkQueues& queues) {
  const Address& peer = remote.address;
  ConnectBody body;
  body.from = own;
  body.queues = static_cast<std::uint32_t>(queues.sending.size());
  for (std::uint32_t i = 0; i < body.queues; ++i) {
    MK_ASSIGN_OR_RETURN(const std::uint32_t first, make_first_packet());
    body.ends[i] = {queues.sending[i].handle->qp_num, first};
  }
  Datagram question;
  question.kind = DatagramKind::kConnect;
  question.number = number;
  question.put(body);
  MK_ASSIGN_OR_RETURN(const Datagram answer, service_->ask(remote, question, deadline()));
  const auto accepted = answer.get<AcceptBody>();
  if (accepted.queues != body.queues) {
    return fail(ErrorCode::kProtocol, "it accepted {} of {} queue pairs", accepted.queues,
                body.queues);
  }
  // It may have moved since we heard of it, and what it says of that later is then no news of this
  // link.
  const bool told =
      accepted.from.magic == Address::kMagic && same_token(accepted.from.endpoint, peer.endpoint);
  const Address there = told ? accepted.from : directory_.newest(remote);
  if (told) service_->learn({remote.peer, there});
  for (std::uint32_t i = 0; i < body.queues; ++i) {
    MK_RETURN_IF_ERROR(connect_queue(queues.sending[i].handle.get(), port.device()->path(), there,
                                     body.ends[i], accepted.ends[i]));
  }
  return there;
}

Result<LinkId> VerbsEndpoint::connect_peer(PeerNumber number_of_peer,
                                           std::span<const std::byte> bytes,
                                           const std::string& peer_name) {
  links_.sweep();
  auto peer = from_blob<Address>(bytes);
  if (!peer) {
    return fail(ErrorCode::kInvalidArgument,
                "cannot connect to {}: its address is not one of the verbs fabric; is its daemon "
                "configured for the same fabric, and of the same version?",
                peer_name);
  }
  // What the Peer service has told may be older than what the peer itself told since.
  Remote remote{number_of_peer, *peer};
  service_->learn(remote);
  *peer = remote.address = directory_.newest(remote);
  const auto port = ports_.need();
  const Address own = service_->address_for(number_of_peer);
  Status ready = port ? check_peer(own, *peer) : propagate(port);
  if (ready) ready = (*port)->device()->check_located();
  // Nobody would answer: who has many links to make again need not wait for each.
  if (ready) ready = (*port)->device()->check_up();
  auto queues = ready ? make_queues(**port) : propagate(ready);
  if (!queues) {
    return fail(queues.error().code, "cannot connect to {}: {}", peer_name, queues.error().message);
  }
  const std::uint64_t number = service_->next_number();
  const auto joined = join(**port, own, remote, number, *queues);
  // Who does not answer need not be told; its end, if there is one, will miss this one.
  if (!joined && joined.error().code != ErrorCode::kTimeout) give_up(remote, number);
  if (!joined) {
    return fail(joined.error().code, "cannot connect to {} from {}: {}", peer_name,
                (*port)->device()->explanation(), joined.error().message);
  }
  remote.address = *joined;
  MK_ASSIGN_OR_RETURN(const LinkId id,
                      add_link(**port, remote, peer_name, number, std::move(*queues)));
  // What happened before the link was watched.
  Link& link = *links_.owned(id);
  if (ports_.get() != *port || ports_.address().version != own.version)
    link.fail(fmt::format("{} cannot be reached by RDMA port {} as before: it was lost, or moved",
                          peer_name, (*port)->device()->name()));
  if (directory_.newest(remote).version != joined->version)
    link.fail(fmt::format("{} got another address meanwhile", peer_name));
  if (!link.failed()) return id;
  const std::string reason = link.reason();
  disconnect(id);
  return fail(ErrorCode::kUnavailable, "{}", reason);
}

Result<LinkId> VerbsEndpoint::add_link(const OpenPort& port, const Remote& peer,
                                       const std::string& peer_name, std::uint64_t number,
                                       LinkQueues queues) {
  auto added = links_.add(std::make_unique<Link>(
      peer, peer_name, number, std::move(queues),
      Sender::Options{.contract = capabilities_.contract,
                      .depth = capabilities_.link_depth,
                      .opening = port.number(),
                      .message_bytes_max = port.device()->message_bytes_max(),
                      .write_timeout_ns = config_.write_timeout_ns,
                      .stop = {},
                      .peer_name = {}}));
  if (!added) {
    give_up(peer, number);
    return propagate(added);
  }
  Link* const link = *added;
  Service::Watched watched{peer, {}, [link](std::string_view reason, bool root) {
                             link->fail(fmt::format("{} {}", link->peer_name(), reason), root);
                           }};
  for (const SendingQueue& queue : link->queues().sending)
    watched.queues.push_back(queue.handle->qp_num);
  link->watch = service_->watch(std::move(watched));
  links_.publish(*link);
  return link->id;
}

void VerbsEndpoint::disconnect(LinkId id) {
  Link* const link = links_.owned(id);
  if (link == nullptr) return;
  service_->unwatch(link->watch);
  link->queues().stop();
  // A farewell over a network that is down may take its time, and many links go down together: the
  // peer finds out by itself then.
  if (!link->failed()) give_up(link->peer(), link->connect_number());
  link->closing.store(true, std::memory_order_release);
}

Result<std::unique_ptr<RemoteRegion>> VerbsEndpoint::import_region(
    LinkId id, std::span<const std::byte> bytes) {
  Link* const link = links_.owned(id);
  if (link == nullptr) return fail(ErrorCode::kNotFound, "there is no link {}", id);
  const auto key = from_blob<Key>(bytes);
  if (!key || !key->covers_all() || !same_token(key->endpoint, link->peer().address.endpoint)) {
    return fail(ErrorCode::kInvalidArgument, "the key of {} bytes is not one of a region of {}",
                bytes.size(), link->peer_name());
  }
  if (link->failed()) {
    return fail(ErrorCode::kLinkDown, "cannot get a region of {}, its link is down: {}",
                link->peer_name(), link->reason());
  }
  // A key that is wrong, or no longer valid, would bring the link down with its first use.
  Datagram question;
  question.kind = DatagramKind::kRegion;
  question.number = service_->next_number();
  question.put(RegionBody{service_->address_for(link->peer().peer), key->region, key->digest()});
  const auto answer = service_->ask(link->peer(), question, deadline());
  if (answer) return std::make_unique<VerbsRemoteRegion>(*key);
  // A peer that hangs may cost the control thread one time-out, not one for every region.
  if (answer.error().code == ErrorCode::kTimeout)
    link->fail(fmt::format("{}: {}", link->peer_name(), answer.error().message));
  return fail(answer.error().code, "cannot get a region of {}: {}", link->peer_name(),
              answer.error().message);
}

std::string VerbsEndpoint::link_reason(LinkId id) const {
  const Link* const link = links_.owned(id);
  return link == nullptr ? std::string() : link->reason();
}

// -- data path --------------------------------------------------------------------------------

std::size_t VerbsEndpoint::post(LinkId id, std::span<const Write> writes) {
  Link* const link = links_.find(id);
  if (link == nullptr) return orphans_.take(id, writes);
  // Its device may be gone: nothing more goes there, not even until the next poll.
  if (link->failed() && !link->sender().closed()) link->sender().close(link->reason());
  return link->sender().post(writes);
}

std::size_t VerbsEndpoint::poll_link(Link& link, std::uint64_t now, std::span<Event> events) {
  Sender& sender = link.sender();
  const bool closing = link.closing.load(std::memory_order_acquire);
  if (!sender.closed() && (closing || link.failed())) {
    sender.close(closing ? "given up" : link.reason());
  }
  sender.progress(now);
  // Before anybody hears of it, and asks why.
  if (sender.closed() && !link.failed())
    link.fail(fmt::format("{} (RDMA port {})", sender.reason(), link.queues().device->name()));
  std::size_t count = sender.report(link.id, events);
  if (sender.closed() && !closing && !link.down_reported && count < events.size()) {
    link.down_reported = true;
    events[count++] = {Event::Kind::kLinkDown, link.id, 0, 0, ErrorCode::kLinkDown};
  }
  if (closing && sender.empty()) links_.release(link);
  return count;
}

std::size_t VerbsEndpoint::poll_links(std::span<Event> events) {
  std::size_t count = orphans_.report(events);
  const std::uint64_t now = now_ns();
  first_link_ = links_.each(
      first_link_, [&](Link& link) { count += poll_link(link, now, events.subspan(count)); });
  return count;
}

bool VerbsEndpoint::flush(const LocalRegion& region, std::uint64_t cookie) {
  const auto& own = static_cast<const VerbsLocalRegion&>(region);
  OpenPort* const port = ports_.held();
  if (port != nullptr && port->number() == own.opening()) {
    Flusher* const flusher = port->flusher();
    return flusher != nullptr && flusher->flush(own, cookie);
  }
  // Of the present opening, and the next poll takes hold of that; or of one that is lost.
  if (ports_.stale() || hopeless_.size() == kHopelessMax) return false;
  hopeless_.push_back(cookie);
  return true;
}

std::size_t VerbsEndpoint::poll_flushes(std::span<Event> events) {
  Flusher* const flusher = ports_.held() != nullptr ? ports_.held()->flusher() : nullptr;
  // A lost port is let go of when nothing waits for it any more.
  if (ports_.stale() && (flusher == nullptr || flusher->give_up())) ports_.turn();
  std::size_t count = 0;
  while (!hopeless_.empty() && count < events.size()) {
    events[count++] = {Event::Kind::kFlushed, 0, hopeless_.back(), 0, ErrorCode::kNotFound};
    hopeless_.pop_back();
  }
  const OpenPort* const port = ports_.held();
  if (port == nullptr || port->flusher() == nullptr) return count;
  return count + port->flusher()->poll(events.subspan(count));
}

std::size_t VerbsEndpoint::poll(std::span<Event> events) {
  std::size_t count = poll_flushes(events);
  // In turn, so that neither completions nor arrivals can starve the other when `events` is short.
  arrivals_first_ = !arrivals_first_;
  if (!arrivals_first_) count += poll_links(events.subspan(count));
  if (OpenPort* const port = ports_.held())
    count += port->acceptor().arrivals(events.subspan(count));
  if (arrivals_first_) count += poll_links(events.subspan(count));
  return count;
}

}  // namespace
}  // namespace verbs

Result<std::unique_ptr<Endpoint>> make_verbs_endpoint(const EndpointConfig& config) {
  MK_RETURN_IF_ERROR(verbs::check_options(config.verbs));
  MK_ASSIGN_OR_RETURN(const Token id, make_token());
  MK_ASSIGN_OR_RETURN(auto port, verbs::OpenPort::open(config, id, 1, 0));
  auto endpoint = std::make_unique<verbs::VerbsEndpoint>(config, id, std::move(port));
  MK_RETURN_IF_ERROR(endpoint->open());
  return endpoint;
}

}  // namespace mk::fabric
