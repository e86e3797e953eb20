#include "daemon/fabric/verbs/endpoint.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <utility>

#include "daemon/fabric/verbs/acceptor.h"
#include "daemon/fabric/verbs/contact.h"
#include "daemon/fabric/verbs/device.h"
#include "daemon/fabric/verbs/directory.h"
#include "daemon/fabric/verbs/flusher.h"
#include "daemon/fabric/verbs/link.h"
#include "daemon/fabric/verbs/region.h"
#include "daemon/fabric/verbs/service.h"

namespace mk::fabric {
namespace verbs {
namespace {

/// Writes in flight on one link, where the device's queues are long enough.
constexpr std::uint32_t kLinkDepth = 256;
constexpr std::uint32_t kPkeyMask = 0x7fff;  ///< the key without the membership bit

Result<Submission> submission_of(const std::string& name) {
  if (name == "auto") return Submission::kAuto;
  if (name == "extended") return Submission::kExtended;
  if (name == "classic") return Submission::kClassic;
  return fail(ErrorCode::kInvalidArgument,
              "fabric.verbs.submission is \"{}\": it is \"auto\", \"extended\" or \"classic\"",
              name);
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

class VerbsEndpoint final : public Endpoint {
 public:
  VerbsEndpoint(const EndpointConfig& config, std::shared_ptr<Device> device, const Token& id)
      : config_(config),
        device_(std::move(device)),
        unordered_(config.verbs.arrival == "immediate"),
        id_(id) {}
  Status open();

  const Capabilities& capabilities() const override { return capabilities_; }
  Bytes address() const override { return to_blob(self()); }
  Result<std::unique_ptr<LocalRegion>> register_memory(const MemoryDescriptor& memory) override;
  Result<LinkId> connect(std::span<const std::byte> address, const std::string& peer_name) override;
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
  /// Where this endpoint is to be reached now. Any thread.
  Address self() const;
  Status check_peer(const Address& peer) const;
  Result<LinkQueues> make_queues() const;
  Status join(const Address& peer, std::uint64_t number, const LinkQueues& queues);
  std::size_t poll_links(std::span<Event> events);
  std::size_t poll_link(Link& link, std::uint64_t now, std::span<Event> events);

  // Declared in the order in which they may be closed backwards: the service's thread uses all that
  // stands above it, and calls into the links.
  const EndpointConfig config_;
  const std::shared_ptr<Device> device_;
  const bool unordered_;
  const Token id_;
  Submission submission_ = Submission::kAuto;
  Capabilities capabilities_;
  Directory directory_;
  const std::shared_ptr<KeyTable> keys_ = std::make_shared<KeyTable>();
  std::unique_ptr<Contact> contact_;
  std::unique_ptr<Acceptor> acceptor_;
  std::unique_ptr<Flusher> flusher_;  ///< control thread: from the first memory of a GPU on
  std::atomic<Flusher*> shared_flusher_{nullptr};  ///< the same, for the other threads
  LinkTable<Link> links_;
  std::unique_ptr<Service> service_;
  OrphanQueue orphans_;           ///< proxy thread
  std::uint32_t first_link_ = 0;  ///< proxy thread: who is polled first, in turn
  bool arrivals_first_ = false;   ///< proxy thread
};

Status VerbsEndpoint::open() {
  MK_ASSIGN_OR_RETURN(submission_, submission_of(config_.verbs.submission));
  // Neither a send queue nor the completion queue that a link's queues share may ever overflow.
  const std::uint32_t depth =
      std::min({kLinkDepth, device_->work_requests_max() / kRequestsPerWrite,
                device_->completions_max() / (kRequestsPerWrite * config_.verbs.queues)});
  if (depth < shm::kBatchMax) {
    return fail(ErrorCode::kUnsupported, "RDMA port {} has queues of {} work requests only",
                device_->name(), device_->work_requests_max());
  }
  capabilities_.name = "verbs";
  capabilities_.device = device_->name();
  capabilities_.contract = unordered_ ? DeliveryContract::kUnordered : DeliveryContract::kOrdered;
  capabilities_.link_depth = depth;
  capabilities_.gpu_direct = config_.verbs.gpu_direct;
  capabilities_.explanation = device_->explanation();
  MK_ASSIGN_OR_RETURN(contact_, Contact::open(device_));
  MK_ASSIGN_OR_RETURN(acceptor_, Acceptor::open(device_, unordered_));
  const auto tend = [this] {
    if (Flusher* const flusher = shared_flusher_.load(std::memory_order_acquire)) flusher->mend();
  };
  MK_ASSIGN_OR_RETURN(service_, Service::start({*device_, *contact_, *acceptor_, *keys_, directory_,
                                                [this] { return self(); }, tend}));
  return {};
}

Address VerbsEndpoint::self() const {
  Address address = device_->address();
  address.endpoint = id_;
  address.contact_queue = contact_->number();
  address.contact_key = contact_->key();
  address.unordered = unordered_ ? 1 : 0;
  return address;
}

Result<std::unique_ptr<LocalRegion>> VerbsEndpoint::register_memory(
    const MemoryDescriptor& memory) {
  if (memory.address == nullptr || memory.bytes == 0) {
    return fail(ErrorCode::kInvalidArgument, "cannot register an empty memory range");
  }
  unsigned access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
  // A flag's write may then never pass the data's on its way over PCIe, whatever the data's may do
  // among themselves. The kernel ignores the wish where the device can't.
  if (config_.verbs.relaxed_ordering && !memory.strictly_ordered)
    access |= IBV_ACCESS_RELAXED_ORDERING;
  if (memory.direct != GpuWindow::kNone) {
    // Of us alone: the queues that peers write by let nobody read.
    access |= IBV_ACCESS_REMOTE_READ;
    if (flusher_ == nullptr) {
      MK_ASSIGN_OR_RETURN(flusher_, Flusher::open(device_));
      shared_flusher_.store(flusher_.get(), std::memory_order_release);
    }
  }
  Key key;
  key.endpoint = id_;
  MK_ASSIGN_OR_RETURN(key.region, make_token());
  key.address = reinterpret_cast<std::uint64_t>(memory.address);
  key.bytes = memory.bytes;
  key.piece_shift = piece_shift_of(memory.bytes, config_.verbs.registration_bytes_max);
  MK_ASSIGN_OR_RETURN(auto pieces, register_pieces(device_->domain(), device_->name(), memory,
                                                   key.piece_shift, access));
  std::vector<std::uint32_t> local_keys;
  for (const RegionHandle& piece : pieces) {
    key.rkeys[local_keys.size()] = piece->rkey;
    local_keys.push_back(piece->lkey);
  }
  return std::make_unique<VerbsLocalRegion>(
      key, std::move(local_keys),
      std::make_unique<Registration>(device_, keys_, std::move(pieces), key));
}

Status VerbsEndpoint::check_peer(const Address& peer) const {
  const Address own = self();
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

Result<LinkQueues> VerbsEndpoint::make_queues() const {
  const std::uint32_t requests = kRequestsPerWrite * capabilities_.link_depth;
  const std::uint32_t completions = config_.verbs.queues * requests;
  LinkQueues queues;
  queues.completions.reset(
      ::ibv_create_cq(device_->context(), static_cast<int>(completions), nullptr, nullptr, 0));
  if (!queues.completions)
    return fail_verb(errno, "RDMA port {} gives no completion queue", device_->name());
  for (std::uint32_t i = 0; i < config_.verbs.queues; ++i) {
    MK_ASSIGN_OR_RETURN(
        SendingQueue queue,
        make_sending_queue(device_->domain(), queues.completions.get(), requests, submission_));
    queues.sending.push_back(std::move(queue));
  }
  return queues;
}

Status VerbsEndpoint::join(const Address& peer, std::uint64_t number, const LinkQueues& queues) {
  ConnectBody body;
  body.from = self();
  body.queues = static_cast<std::uint32_t>(queues.sending.size());
  for (std::uint32_t i = 0; i < body.queues; ++i) {
    MK_ASSIGN_OR_RETURN(const std::uint32_t first, make_first_packet());
    body.ends[i] = {queues.sending[i].handle->qp_num, first};
  }
  Datagram question;
  question.kind = DatagramKind::kConnect;
  question.number = number;
  question.put(body);
  MK_ASSIGN_OR_RETURN(const Datagram answer, service_->ask(peer, question, deadline()));
  const auto accepted = answer.get<AcceptBody>();
  if (accepted.queues != body.queues) {
    return fail(ErrorCode::kProtocol, "it accepted {} of {} queue pairs", accepted.queues,
                body.queues);
  }
  for (std::uint32_t i = 0; i < body.queues; ++i) {
    MK_RETURN_IF_ERROR(connect_queue(queues.sending[i].handle.get(), device_->path(), peer,
                                     body.ends[i], accepted.ends[i]));
  }
  return {};
}

Result<LinkId> VerbsEndpoint::connect(std::span<const std::byte> bytes,
                                      const std::string& peer_name) {
  links_.sweep();
  auto peer = from_blob<Address>(bytes);
  if (!peer) {
    return fail(ErrorCode::kInvalidArgument,
                "cannot connect to {}: its address is not one of the verbs fabric; is its daemon "
                "configured for the same fabric, and of the same version?",
                peer_name);
  }
  if (const Status fits = check_peer(*peer); !fits) {
    return fail(fits.error().code, "cannot connect to {}: {}", peer_name, fits.error().message);
  }
  // What the Peer service has told may be older than what the peer itself told since.
  directory_.learn(*peer);
  *peer = directory_.newest(*peer);
  if (!device_->located()) {
    if (const auto found = device_->relocate(); !found)
      return fail(found.error().code, "cannot connect to {}: {}", peer_name, found.error().message);
  }
  MK_ASSIGN_OR_RETURN(LinkQueues queues, make_queues());
  Datagram given_up;
  given_up.kind = DatagramKind::kDisconnect;
  given_up.number = service_->next_number();
  if (const Status joined = join(*peer, given_up.number, queues); !joined) {
    // Who does not answer need not be told; its end, if there is one, will miss this one.
    if (joined.error().code != ErrorCode::kTimeout) service_->tell(*peer, given_up);
    return fail(joined.error().code, "cannot connect to {} from {}: {}", peer_name,
                device_->explanation(), joined.error().message);
  }
  auto made =
      std::make_unique<Link>(*peer, peer_name, given_up.number, std::move(queues),
                             Sender::Options{.contract = capabilities_.contract,
                                             .depth = capabilities_.link_depth,
                                             .message_bytes_max = device_->message_bytes_max(),
                                             .write_timeout_ns = config_.write_timeout_ns,
                                             .stop = {},
                                             .peer_name = {}});
  auto added = links_.add(std::move(made));
  if (!added) {
    service_->tell(*peer, given_up);
    return propagate(added);
  }
  Link* const link = *added;
  Service::Watched watched{*peer, {}, [link](std::string_view reason) {
                             link->fail(fmt::format("{} {}", link->peer_name(), reason));
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
  if (!link->failed()) {
    Datagram given_up;
    given_up.kind = DatagramKind::kDisconnect;
    given_up.number = link->connect_number();
    service_->tell(link->peer(), given_up);
  }
  link->closing.store(true, std::memory_order_release);
}

Result<std::unique_ptr<RemoteRegion>> VerbsEndpoint::import_region(
    LinkId id, std::span<const std::byte> bytes) {
  Link* const link = links_.owned(id);
  if (link == nullptr) return fail(ErrorCode::kNotFound, "there is no link {}", id);
  const auto key = from_blob<Key>(bytes);
  if (!key || !same_token(key->endpoint, link->peer().endpoint)) {
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
  question.put(RegionBody{self(), key->region, key->digest()});
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
  return link == nullptr ? orphans_.take(id, writes) : link->sender().post(writes);
}

std::size_t VerbsEndpoint::poll_link(Link& link, std::uint64_t now, std::span<Event> events) {
  Sender& sender = link.sender();
  const bool closing = link.closing.load(std::memory_order_acquire);
  if (!sender.closed() && (closing || link.failed())) {
    sender.close(closing ? "given up" : link.reason());
  }
  sender.progress(now);
  std::size_t count = sender.report(link.id, events);
  if (sender.closed() && !closing && !link.down_reported && count < events.size()) {
    link.fail(sender.reason());
    link.down_reported = true;
    events[count++] = {Event::Kind::kLinkDown, link.id, 0, 0, ErrorCode::kLinkDown};
  }
  if (closing && sender.empty()) links_.release(link);
  return count;
}

std::size_t VerbsEndpoint::poll_links(std::span<Event> events) {
  std::size_t count = orphans_.report(events);
  const std::uint32_t slots = links_.slot_count();
  if (slots == 0) return count;
  const std::uint64_t now = now_ns();
  first_link_ = (first_link_ + 1) % slots;
  for (std::uint32_t i = 0; i < slots; ++i) {
    if (Link* const link = links_.at((first_link_ + i) % slots))
      count += poll_link(*link, now, events.subspan(count));
  }
  return count;
}

bool VerbsEndpoint::flush(const LocalRegion& region, std::uint64_t cookie) {
  Flusher* const flusher = shared_flusher_.load(std::memory_order_acquire);
  return flusher != nullptr && flusher->flush(static_cast<const VerbsLocalRegion&>(region), cookie);
}

std::size_t VerbsEndpoint::poll(std::span<Event> events) {
  std::size_t flushed = 0;
  if (Flusher* const flusher = shared_flusher_.load(std::memory_order_acquire)) {
    flushed = flusher->poll(events);
    events = events.subspan(flushed);
  }
  // In turn, so that neither completions nor arrivals can starve the other when `events` is short.
  arrivals_first_ = !arrivals_first_;
  if (arrivals_first_) {
    const std::size_t count = acceptor_->arrivals(events);
    return flushed + count + poll_links(events.subspan(count));
  }
  const std::size_t count = poll_links(events);
  return flushed + count + acceptor_->arrivals(events.subspan(count));
}

}  // namespace
}  // namespace verbs

Result<std::unique_ptr<Endpoint>> make_verbs_endpoint(const EndpointConfig& config) {
  MK_RETURN_IF_ERROR(verbs::check_options(config.verbs));
  MK_ASSIGN_OR_RETURN(auto device, verbs::Device::open(config));
  MK_ASSIGN_OR_RETURN(const Token id, make_token());
  auto endpoint = std::make_unique<verbs::VerbsEndpoint>(config, std::move(device), id);
  MK_RETURN_IF_ERROR(endpoint->open());
  return endpoint;
}

}  // namespace mk::fabric
