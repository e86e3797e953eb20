#include <algorithm>
#include <utility>

#include "daemon/control/control_plane_impl.h"
#include "daemon/plant.h"
#include "shm/limits.h"

namespace mk::daemon {

// A buffer, its handle and its flags come back when no command, kernel or network write can name
// them any more. A deregistration speaks for the owner: what is committed on any rank by then is
// the last. A retirement is one rank's word: the operator's other ranks may be amid their launches.
// Each says by its own when it has done with the buffer.

namespace {

/// How long a DeregisterBuffer waits for the rail peers' daemons.
constexpr std::uint64_t kWithdrawTimeoutNs = 30'000'000'000;

/// What the session has bound for a buffer of a rail peer, or null.
PeerBuffer* peer_buffer(Session* session, std::uint32_t rank, std::uint16_t handle) {
  if (session == nullptr) return nullptr;
  const auto binding = session->peers.find(rank);
  if (binding == session->peers.end()) return nullptr;
  const auto buffer = binding->second.buffers.find(handle);
  return buffer == binding->second.buffers.end() ? nullptr : &buffer->second;
}

/// Writes to a range of the peer's flags that have been completed; nullopt: it is not known.
std::optional<std::uint64_t> arrivals_sent(const Session* session, const RegionWithdraw& region) {
  if (session == nullptr) return std::nullopt;
  const auto binding = session->peers.find(region.rank);
  if (binding == session->peers.end()) return std::nullopt;
  std::uint64_t sum = 0;
  if (binding->second.arrivals_sent == nullptr) return sum;  // the flags themselves are written
  const std::uint64_t end = std::min<std::uint64_t>(
      std::uint64_t{region.flag_base} + region.flag_count, binding->second.flag_count);
  for (std::uint64_t at = region.flag_base; at < end; at += shm::kFlagGranule)
    sum += binding->second.arrivals_sent[at / shm::kFlagGranule].value();
  return sum;
}

}  // namespace

// -- the session's own buffers --------------------------------------------------------------------

void ControlPlane::Impl::deregister_buffer(Client& client, std::uint64_t request,
                                           shm::DeregisterBuffer& message, shm::Frame&) {
  Session& session = *client.session;
  const auto found = session.buffers.find(message.handle);
  if (found == session.buffers.end() || found->second.withdrawal) {
    reply_error(client.id, request,
                {ErrorCode::kNotFound, fmt::format("{} has no buffer with handle {}",
                                                   session.describe(), message.handle)});
    return;
  }
  withdraw(session, message.handle,
           {.request = request, .deadline_ns = now_() + kWithdrawTimeoutNs});
}

void ControlPlane::Impl::retire(Client& client, std::uint64_t request, shm::Retire& message,
                                shm::Frame&) {
  Session& session = *client.session;
  const auto refuse_with = [&](ErrorCode code, const std::string& what) {
    reply_error(client.id, request, {code, fmt::format("{}: {}", session.describe(), what)});
  };
  const auto found = session.buffers.find(message.handle);
  if (found == session.buffers.end() || found->second.withdrawal) {
    refuse_with(ErrorCode::kNotFound, fmt::format("no buffer with handle {}", message.handle));
    return;
  }
  BufferWithdrawal withdrawal{.request = request};
  for (const auto& peer : message.peers) withdrawal.holders.insert(peer.rank);
  if (message.flag_base != shm::kNoFlags) {
    const auto range = session.flag_ranges.find(message.flag_base);
    if (range == session.flag_ranges.end() || range->second.retiring) {
      refuse_with(ErrorCode::kNotFound,
                  fmt::format("no flags were given out from {}", message.flag_base));
      return;
    }
    range->second.retiring = true;
    withdrawal.flag_base = message.flag_base;
    withdrawal.flag_count = range->second.count;
  }
  for (const auto& peer : message.peers) retire_peer_buffer(session, peer);
  withdraw(session, message.handle, std::move(withdrawal));
}

void ControlPlane::Impl::withdraw(Session& session, std::uint16_t handle,
                                  BufferWithdrawal withdrawal) {
  Job& job = *session.job;
  if (job.state == JobState::kUp) {  // else nobody else knows of it
    for (const auto& [rank, part] : job.parts) {
      if (part.gone) {
        withdrawal.arrivals.reset();  // it said nothing of what it sent
      } else {
        withdrawal.nodes_left.insert(part.node);
      }
    }
  }
  RegionWithdraw told{.job = job.name,
                      .part_id = job.part_id,
                      .rank = session.attach.rank,
                      .handle = handle,
                      .flag_base = withdrawal.flag_count != 0 ? withdrawal.flag_base : 0,
                      .flag_count = withdrawal.flag_count};
  const std::set<std::uint32_t> holders = withdrawal.holders;
  session.buffers.at(handle).withdrawal = std::move(withdrawal);
  proxy_of(session).apply(UnbindBuffer{session.slot, handle});
  if (job.state != JobState::kUp) return;
  for (const auto& [node_rank, part] : job.parts) {
    told.shared = holders.contains(node_rank * job.local_size + session.attach.local_rank);
    send_to_part(job, part, told);
  }
}

bool ControlPlane::Impl::may_hold(const Session& session, const Buffer& buffer) {
  const std::uint32_t rank = session.attach.rank;
  return session.state == SessionState::kUp && session.retires &&
         buffer.withdrawal->holders.contains(rank) && !buffer.retired_by.contains(rank);
}

bool ControlPlane::Impl::held_here(const Session& owner, const Buffer& buffer) const {
  return std::ranges::any_of(owner.job->sessions(), [&](const Session* other) {
    return other != &owner && may_hold(*other, buffer);
  });
}

void ControlPlane::Impl::advance_withdrawal(Session& session, std::uint16_t handle) {
  const auto found = session.buffers.find(handle);
  if (found == session.buffers.end() || !found->second.withdrawal) return;
  BufferWithdrawal& withdrawal = *found->second.withdrawal;
  if (!withdrawal.proxy_released || !withdrawal.nodes_left.empty()) return;
  if (held_here(session, found->second)) return;
  if (withdrawal.resets_flags) return;  // on_flags_reset goes on
  if (withdrawal.flag_count != 0 && !session.drained) {
    const bool ordered =
        proxy_of(session).endpoint().capabilities().contract == fabric::DeliveryContract::kOrdered;
    // What a fabric has received for the region and not shown, it shows never once that is gone.
    if (ordered) found->second.region.reset();
    if (ordered || withdrawal.arrivals) {
      withdrawal.resets_flags = true;
      proxy_of(session).apply(ResetFlags{session.slot, withdrawal.flag_base, withdrawal.flag_count,
                                         ordered ? 0 : *withdrawal.arrivals});
      return;
    }
    // How much is still to arrive nobody knows, so these flags are not used again.
  }
  if (session.active() && !withdrawal.answered && session.client) {
    reply(*session.client, withdrawal.request, shm::Done{});
  }
  session.remove_buffer(handle);
}

void ControlPlane::Impl::advance_withdrawals(Job& job) {
  for (Session* session : job.sessions()) {
    std::vector<std::uint16_t> handles;
    for (const auto& [handle, buffer] : session->buffers) {
      if (buffer.withdrawal) handles.push_back(handle);
    }
    for (const std::uint16_t handle : handles) advance_withdrawal(*session, handle);
  }
}

void ControlPlane::Impl::on_flags_reset(Session& session, std::uint32_t base) {
  const auto found = std::ranges::find_if(session.buffers, [&](const auto& entry) {
    const auto& withdrawal = entry.second.withdrawal;
    return withdrawal && withdrawal->resets_flags && withdrawal->flag_base == base;
  });
  if (found == session.buffers.end()) return;
  session.flag_ranges.erase(base);
  found->second.withdrawal->flag_count = 0;
  found->second.withdrawal->resets_flags = false;
  advance_withdrawal(session, found->first);
}

// -- buffers of other ranks -----------------------------------------------------------------------

void ControlPlane::Impl::retire_peer_buffer(Session& session,
                                            const shm::Retire::PeerBuffer& named) {
  Job& job = *session.job;
  if (Session* owner = job.session_of(named.rank); owner != nullptr && owner != &session) {
    const auto buffer = owner->buffers.find(named.handle);
    if (buffer == owner->buffers.end()) return;
    buffer->second.retired_by.insert(session.attach.rank);
    advance_withdrawal(*owner, named.handle);
    return;
  }
  unbind_peer_buffer(session, named.rank, named.handle);
}

void ControlPlane::Impl::retire_all(Session& session) {
  advance_withdrawals(*session.job);  // of local ranks: this one is not up any more
  for (const auto& [rank, binding] : session.peers) {
    for (const auto& [handle, buffer] : binding.buffers) {
      if (buffer.withdrawal) unbind_peer_buffer(session, rank, handle);
    }
  }
}

void ControlPlane::Impl::unbind_peer_buffer(Session& session, std::uint32_t peer_rank,
                                            std::uint16_t handle) {
  PeerBuffer* buffer = peer_buffer(&session, peer_rank, handle);
  // A fenced session lets go of all when it is drained.
  if (buffer == nullptr || buffer->unbinding || session.fenced) return;
  buffer->unbinding = true;
  proxy_of(session).apply(
      UnbindPeerBuffer{session.slot, static_cast<std::uint16_t>(peer_rank), handle});
}

void ControlPlane::Impl::on_peer_buffer_released(Session& session, std::uint32_t peer_rank,
                                                 std::uint16_t handle) {
  PeerBuffer* buffer = peer_buffer(&session, peer_rank, handle);
  if (buffer == nullptr || !buffer->unbinding) return;
  buffer->released = true;
  buffer->region.reset();
  if (buffer->withdrawal) send_back(session, peer_rank, handle);
}

void ControlPlane::Impl::send_back(Session& session, std::uint32_t peer_rank,
                                   std::uint16_t handle) {
  PeerBinding& binding = session.peers.at(peer_rank);
  const auto buffer = binding.buffers.find(handle);
  RegionWithdraw back = std::move(*buffer->second.withdrawal);
  back.arrivals = arrivals_sent(&session, back);
  binding.buffers.erase(buffer);
  (void)transport_.send(binding.node, back);  // if the stream is down, on_peer_down says so
}

void ControlPlane::Impl::release_withdrawn(Session& session) {
  std::vector<std::pair<std::uint32_t, std::uint16_t>> withdrawn;
  for (const auto& [rank, binding] : session.peers) {
    for (const auto& [handle, buffer] : binding.buffers) {
      if (buffer.withdrawal) withdrawn.emplace_back(rank, handle);
    }
  }
  for (const auto& [rank, handle] : withdrawn) send_back(session, rank, handle);
}

Status ControlPlane::Impl::on(NodeId node, RegionWithdraw& region) {
  for (const auto& job : jobs_) {
    if (job->part_id != region.part_id) continue;
    // Ours has come back.
    Session* session = job->session_of(region.rank);
    if (session == nullptr) return {};
    const auto buffer = session->buffers.find(region.handle);
    if (buffer == session->buffers.end() || !buffer->second.withdrawal) return {};
    BufferWithdrawal& withdrawal = *buffer->second.withdrawal;
    if (withdrawal.nodes_left.erase(node) == 0) return {};
    if (!region.arrivals) withdrawal.arrivals.reset();
    if (withdrawal.arrivals) *withdrawal.arrivals += *region.arrivals;
    advance_withdrawal(*session, region.handle);
    return {};
  }
  RemotePart* part = nullptr;
  Job* job = job_with(node, region.part_id, part);
  if (job == nullptr) return {};
  MK_RETURN_IF_ERROR(part->check_rank(region.rank, "a withdrawal"));
  Session* session = job->locals[region.rank % job->local_size];
  if (PeerBuffer* buffer = peer_buffer(session, region.rank, region.handle); buffer != nullptr) {
    if (buffer->withdrawal) return {};
    buffer->withdrawal = region;
    // Our rank may be amid a launch that writes there; it says by itself when it will not any more.
    const bool waits = region.shared && session->retires && session->state == SessionState::kUp;
    if (buffer->released || session->drained) {
      send_back(*session, region.rank, region.handle);
    } else if (!waits) {
      unbind_peer_buffer(*session, region.rank, region.handle);
    }
    return {};  // sent back when the proxy has let it go, or the whole session
  }
  std::erase_if(part->regions_waiting, [&](const RegionAnnounce& waiting) {
    return waiting.rank == region.rank && waiting.handle == region.handle;
  });
  region.arrivals = arrivals_sent(session, region);
  (void)transport_.send(node, region);  // if the stream is down, on_peer_down says so
  return {};
}

}  // namespace mk::daemon
