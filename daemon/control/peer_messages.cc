#include <algorithm>

#include "daemon/control/control_plane_impl.h"
#include "daemon/control/rail_names.h"
#include "daemon/plant.h"
#include "shm/host/text.h"
#include "shm/layout.h"
#include "shm/limits.h"

namespace mk::daemon {

namespace {

/// Other daemons are trusted to mean well, not to be right: what they send is checked like all
/// else.
using fabric::kAddressBytesMax;
using fabric::kKeyBytesMax;

Status check_address(const Bytes& address) {
  if (address.size() <= kAddressBytesMax) return {};
  return fail(ErrorCode::kProtocol, "a rail address has {} bytes; at most {}", address.size(),
              kAddressBytesMax);
}

Status two_buffers(const Job& job, const RegionAnnounce& region) {
  return fail(ErrorCode::kProtocol, "rank {} of job '{}' has two buffers with handle {}",
              region.rank, job.name, region.handle);
}

}  // namespace

Status ControlPlane::Impl::peer_message(NodeId node, PeerMessage message) {
  const auto peer = peers_.find(node);
  if (peer == peers_.end()) {
    return fail(ErrorCode::kProtocol, "node {} is not among the configured peers", node);
  }
  if (!peer->second.up && !std::holds_alternative<PeerHello>(message)) {
    return fail(ErrorCode::kProtocol, "{} did not begin with a hello", describe_node(node));
  }
  const Status status = std::visit([&](auto& content) { return on(node, content); }, message);
  if (status) return {};
  return fail(status.error().code, "{}: {}", describe_node(node), status.error().message);
}

Status ControlPlane::Impl::check_hello(NodeId node, const PeerHello& hello) const {
  if (hello.node != node) {
    return fail(ErrorCode::kInvalidArgument,
                "it calls itself node {}; its node id and our peer list disagree", hello.node);
  }
  if (hello.abi_major != shm::kAbiMajor) {
    return fail(ErrorCode::kAbiMismatch,
                "it (mkerneld {}) speaks ABI {}.{} and this daemon (mkerneld {}) {}.{}; install "
                "the same major version on all nodes",
                hello.version, hello.abi_major, hello.abi_minor, options_.version, shm::kAbiMajor,
                shm::kAbiMinor);
  }
  if (hello.protocol != kPeerProtocol) {
    return fail(ErrorCode::kAbiMismatch,
                "it (mkerneld {}) speaks version {} of what daemons say to each other, and this "
                "daemon (mkerneld {}) version {}; install the same on all nodes",
                hello.version, hello.protocol, options_.version, kPeerProtocol);
  }
  if (hello.fabric != hello_.fabric) {
    return fail(ErrorCode::kInvalidArgument,
                "it has the fabric '{}' and this daemon '{}'; configure the same on all nodes",
                hello.fabric, hello_.fabric);
  }
  if (hello.rail_addresses.size() != proxies_.size()) {
    return fail(ErrorCode::kInvalidArgument,
                "it has {} rails and this daemon {}; configure as many on all nodes",
                hello.rail_addresses.size(), proxies_.size());
  }
  for (const Bytes& address : hello.rail_addresses) MK_RETURN_IF_ERROR(check_address(address));
  return {};
}

void ControlPlane::Impl::tell_rails() {
  for (std::uint32_t rail = 0; rail < proxies_.size(); ++rail) {
    Bytes present = proxies_[rail]->endpoint().address();
    if (present == rail_addresses_[rail]) continue;
    rail_addresses_[rail] = std::move(present);
    for (const auto& [node, peer] : peers_) tell_rail(node, rail);
  }
}

void ControlPlane::Impl::tell_rail(NodeId node, std::uint32_t rail) {
  const PeerState& peer = peers_.at(node);
  // Whom it does not reach is told after the next hello.
  if (peer.up)
    (void)transport_.send(
        node, RailMoved{rail, proxies_[rail]->endpoint().personal(rail_addresses_[rail], node)});
}

Status ControlPlane::Impl::on(NodeId node, RailMoved& moved) {
  PeerState& peer = peers_.at(node);
  if (moved.rail >= proxies_.size()) {
    return fail(ErrorCode::kProtocol, "its rail {} has moved; it has {}", moved.rail,
                proxies_.size());
  }
  MK_RETURN_IF_ERROR(check_address(moved.address));
  Bytes& known = peer.hello.rail_addresses[moved.rail];
  if (known == moved.address) return {};
  known = std::move(moved.address);
  links_.on_moved(node, moved.rail);
  return {};
}

Status ControlPlane::Impl::on(NodeId node, PeerHello& hello) {
  PeerState& peer = peers_.at(node);
  if (peer.up) peer_down(node, "its stream was replaced by a new one");
  if (Status fits = check_hello(node, hello); !fits) {
    peer.down_reason = fits.error().message;
    return fits;
  }
  peer.up = true;
  peer.hello = std::move(hello);
  log(LogLevel::kInfo,
      fmt::format("connected to {}, mkerneld {}", describe_node(node), peer.hello.version),
      {{"node", fmt::format("{}", node)}});
  const std::string apart = control::misalignment(hello_.rail_devices, peer.hello.rail_devices);
  if (!apart.empty()) {
    log(LogLevel::kWarning,
        fmt::format("the rails of {} are on other NICs than this node's ({}): where a rail's NICs "
                    "share a switch, its traffic leaves that switch now; name the NICs in the "
                    "configuration, or ignore this on another network",
                    describe_node(node), apart),
        {{"node", fmt::format("{}", node)}});
  }
  // Our hello is of the start.
  tell_rails();
  for (std::uint32_t rail = 0; rail < proxies_.size(); ++rail) {
    if (rail_addresses_[rail] != hello_.rail_addresses[rail]) tell_rail(node, rail);
  }
  for (Job* job : jobs()) {
    if (job->state == JobState::kAnnounced && !job->ending) announce(*job);
  }
  return {};
}

Job* ControlPlane::Impl::job_with(NodeId node, std::uint64_t part_id, RemotePart*& part) {
  for (auto job = jobs_.rbegin(); job != jobs_.rend(); ++job) {
    part = (*job)->part_from(node);
    if (part != nullptr && part->part.part_id == part_id) return job->get();
  }
  part = nullptr;
  return nullptr;
}

Status ControlPlane::Impl::on(NodeId node, JobReady& ready) {
  RemotePart* part = nullptr;
  // An unknown part is one whose job has ended here: the sender will hear of it.
  Job* job = job_with(node, ready.part_id, part);
  if (job == nullptr || ready.peer_part_id != job->part_id) return {};
  part->ready = true;
  advance(*job);
  return {};
}

Status ControlPlane::Impl::on(NodeId node, RegionAnnounce& region) {
  RemotePart* part = nullptr;
  Job* job = job_with(node, region.part_id, part);
  if (job == nullptr) return {};
  MK_RETURN_IF_ERROR(part->check_rank(region.rank, "a buffer"));
  if (region.handle == shm::kNoHandle || region.handle > shm::kBuffersMax || region.bytes == 0 ||
      region.bytes > shm::kBufferBytesMax || region.key.size() > kKeyBytesMax) {
    return fail(ErrorCode::kProtocol,
                "rank {} of job '{}' has a buffer {} of {} bytes with a key of {} bytes",
                region.rank, job->name, region.handle, region.bytes, region.key.size());
  }
  if (job->state == JobState::kUp && part->regions_waiting.empty())
    return bind_peer_buffer(*job, *part, region);
  const bool twice = std::ranges::any_of(part->regions_waiting, [&](const RegionAnnounce& other) {
    return other.rank == region.rank && other.handle == region.handle;
  });
  if (twice) return two_buffers(*job, region);
  part->regions_waiting.push_back(std::move(region));
  return {};
}

Status ControlPlane::Impl::bind_peer_buffer(Job& job, const RemotePart& part,
                                            const RegionAnnounce& region) {
  Session* session = job.locals[region.rank % job.local_size];
  if (session == nullptr || !session->active() || session->fenced) return {};
  PeerBinding& binding = session->peers.at(region.rank);
  if (binding.buffers.contains(region.handle)) {
    return two_buffers(job, region);
  }
  auto imported = proxy_of(*session).endpoint().import_region(binding.link->id, region.key);
  if (!imported) {
    fail_session(*session,
                 {imported.error().code,
                  fmt::format("cannot reach buffer {} of rank {} on {}: {}", region.handle,
                              region.rank, describe_node(part.node), imported.error().message)});
    return {};
  }
  PeerBuffer& buffer = binding.buffers[region.handle];
  buffer.region = std::move(*imported);
  proxy_of(*session).apply(BindPeerBuffer{.slot = session->slot,
                                          .peer_rank = static_cast<std::uint16_t>(region.rank),
                                          .handle = region.handle,
                                          .region = buffer.region.get(),
                                          .bytes = region.bytes});
  return {};
}

Status ControlPlane::Impl::on(NodeId node, ExchangePart& exchange) {
  RemotePart* part = nullptr;
  Job* job = job_with(node, exchange.part_id, part);
  if (job == nullptr || job->failed) return {};
  MK_RETURN_IF_ERROR(part->check_rank(exchange.rank, "an exchange"));
  if (exchange.tag.size() > shm::kNameBytesMax) {
    return fail(ErrorCode::kProtocol, "an exchange tag of {} bytes", exchange.tag.size());
  }
  if (job->state != JobState::kUp || !part->regions_waiting.empty() ||
      !part->exchanges_waiting.empty()) {
    // Its job is up, perhaps with our part of an earlier run: then it is forgotten with its part.
    const auto waiting = static_cast<std::uint64_t>(
        std::ranges::count(part->exchanges_waiting, exchange.rank, &ExchangePart::rank));
    MK_RETURN_IF_ERROR(job->exchange.check_remote(exchange.rank, exchange.sequence, waiting,
                                                  exchange.blob.size()));
    part->exchanges_waiting.push_back(std::move(exchange));
    return {};
  }
  MK_RETURN_IF_ERROR(job->exchange.put_remote(exchange.rank, exchange.sequence, exchange.tag,
                                              std::move(exchange.blob)));
  answer_exchanges(*job);
  return {};
}

Status ControlPlane::Impl::on(NodeId node, JobLeft& left) {
  PeerState& peer = peers_.at(node);
  std::erase_if(peer.offers, [&](const auto& entry) {
    return entry.second.offer.part_id == left.part_id && !MK_PLANT(early_part_kept);
  });
  for (Job* job : jobs()) {
    RemotePart* part = job->part_from(node);
    if (part == nullptr || part->part.part_id != left.part_id) continue;
    if (left.rank >= job->world()) {
      return fail(ErrorCode::kProtocol, "rank {} left job '{}' of {} ranks", left.rank, job->name,
                  job->world());
    }
    part_left(*job, *part, left);
  }
  return {};
}

void ControlPlane::Impl::unbind(Job& job, NodeId node) {
  // Proxies hear of peers when the job is up, so nothing but our own tables names it.
  for (Session* session : job.sessions()) {
    proxy_of(*session).apply(AdmitPeer{session->slot, node, false});
    std::erase_if(session->peers, [&](const auto& entry) { return entry.second.node == node; });
  }
}

void ControlPlane::Impl::forget_part(Job& job, const RemotePart& part) {
  unbind(job, part.node);
  job.met.erase(part.node);
  job.parts.erase(part.part.node_rank);
  job.state = JobState::kAnnounced;
  meet_all(job);
  advance(job);
}

void ControlPlane::Impl::part_left(Job& job, RemotePart& part, const JobLeft& left) {
  if (!job.ending && job.state != JobState::kUp && left.peer_part_id &&
      *left.peer_part_id != job.part_id) {
    forget_part(job, part);
    return;
  }
  Error cause{left.code, left.reason};
  std::uint32_t rank = left.rank;
  if (left.code == ErrorCode::kOk) {
    part.gone = part.quiet = true;
    // It has no use for our buffers any more, and nobody to send them back; and its own memory goes
    // before our ranks do, whatever they still write.
    for (Session* session : job.sessions()) {
      const std::uint32_t peer = part.part.node_rank * job.local_size + session->attach.local_rank;
      proxy_of(*session).apply(RetirePeer{session->slot, static_cast<std::uint16_t>(peer)});
      std::vector<std::uint16_t> handles;
      for (auto& [handle, buffer] : session->buffers) {
        if (buffer.withdrawal && buffer.withdrawal->nodes_left.erase(part.node) != 0) {
          buffer.withdrawal->arrivals.reset();  // it says nothing more
          handles.push_back(handle);
        }
      }
      for (const std::uint16_t handle : handles) advance_withdrawal(*session, handle);
    }
    if (job.failed || !job.has_active()) return;
    const std::uint32_t first = part.part.node_rank * job.local_size;
    if (job.state == JobState::kUp) {
      for (std::uint32_t local = 0; local < job.local_size; ++local) {
        note_leave(job, first + local, fmt::format("all ranks of {}", describe_node(part.node)));
      }
      check_leavers(job);
      return;
    }
    cause = {ErrorCode::kPeerLost, "all its ranks detached before all had attached"};
    rank = first;
  }
  const std::string reason = shm::plain_text(cause.message, shm::kMessageTextBytesMax);
  // What concerns the job as a whole before it is up is our ranks' error as much as theirs.
  const bool whole = job.state != JobState::kUp && (cause.code == ErrorCode::kTimeout ||
                                                    cause.code == ErrorCode::kAlreadyExists ||
                                                    cause.code == ErrorCode::kInvalidArgument);
  const Error error =
      whole ? Error{cause.code, fmt::format("{} reports: {}", describe_node(part.node), reason)}
            : lost_error(job, rank, reason);
  fail_job(job, error, {rank, cause.code, reason});
}

void ControlPlane::Impl::peer_down(NodeId node, const std::string& reason) {
  const auto found = peers_.find(node);
  if (found == peers_.end()) return;
  PeerState& peer = found->second;
  peer.down_reason = reason;
  if (!peer.up) return;
  peer.up = false;
  peer.hello = {};
  peer.offers.clear();
  log(LogLevel::kWarning, fmt::format("lost {}: {}", describe_node(node), reason),
      {{"node", fmt::format("{}", node)}});
  for (Job* job : jobs()) {
    job->told.erase(node);
    if (job->state == JobState::kAnnounced) job->met.erase(node);
    RemotePart* part = job->part_from(node);
    if (part == nullptr) continue;
    if (job->state == JobState::kAnnounced && !job->ending) {
      // It has not heard that we are ready: it may be back, with the part, before the deadline.
      unbind(*job, node);
      job->parts.erase(part->part.node_rank);
      continue;
    }
    part->gone = true;
    const std::uint32_t rank = part->part.node_rank * job->local_size;
    const std::string what = fmt::format("its daemon cannot be reached: {}", reason);
    if (job->has_active()) {
      fail_job(*job, lost_error(*job, rank, what), {rank, ErrorCode::kPeerLost, what});
    }
  }
  links_.on_peer_down(node, reason);
}

void ControlPlane::Impl::peers_changed() {
  const std::vector<NodeId> nodes = transport_.nodes();
  for (const NodeId node : nodes) {
    const auto [peer, fresh] = peers_.try_emplace(node);
    if (!fresh) continue;
    peer->second.down_reason = "never seen";
    log(LogLevel::kInfo, fmt::format("{} joins the cluster", describe_node(node)),
        {{"node", fmt::format("{}", node)}});
  }
  std::erase_if(peers_, [&](const auto& entry) {
    // What it had part in has ended with its stream.
    if (entry.second.up || std::ranges::count(nodes, entry.first) != 0) return false;
    links_.forget(entry.first);
    log(LogLevel::kInfo, fmt::format("node {} leaves the cluster", entry.first),
        {{"node", fmt::format("{}", entry.first)}});
    return true;
  });
}

}  // namespace mk::daemon
