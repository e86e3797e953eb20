#include <sys/random.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "daemon/control/control_plane_impl.h"
#include "shm/host/text.h"
#include "shm/layout.h"
#include "shm/limits.h"

namespace mk::daemon {

// How two nodes find out that they have parts of one job, before either tells the other anything
// that opens memory. Offers go to all nodes, a proof answers an offer, a part answers a proof.

namespace {

/// A part is offered again while its job waits, so that a peer that lost the offer has it soon.
constexpr std::uint64_t kAnnounceIntervalNs = 30'000'000'000;
/// A daemon has at most this many parts: each has a session.
constexpr std::size_t kOffersMax = shm::kSessionsMax;

using fabric::kKeyBytesMax;

Status check_offer_shape(const JobOffer& offer) {
  const auto bad = [&](const std::string& what) {
    return fail(ErrorCode::kProtocol, "its part of job '{}' {}", offer.job, what);
  };
  if (!shm::is_job_name(offer.job)) return bad("has a bad name");
  if (offer.nodes < 2 || offer.nodes > shm::kNodesMax || offer.local_size == 0 ||
      offer.local_size > shm::kLocalRanksMax || offer.node_rank >= offer.nodes ||
      offer.nodes * offer.local_size > shm::kWorldMax) {
    return bad(fmt::format("has node rank {} of {} nodes of {} ranks", offer.node_rank, offer.nodes,
                           offer.local_size));
  }
  if (offer.nonce.size() != kNonceBytes) {
    return bad(fmt::format("has a nonce of {} bytes", offer.nonce.size()));
  }
  return {};
}

/// The part must be the one that was offered.
Status check_part(const JobPart& part, const JobOffer& offer, std::size_t rails) {
  const auto bad = [&](const std::string& what) {
    return fail(ErrorCode::kProtocol, "its part of job '{}' {}", part.job, what);
  };
  if (part.node_rank != offer.node_rank || part.nodes != offer.nodes ||
      part.local_size != offer.local_size) {
    return bad(
        fmt::format("has node rank {} of {} nodes of {} ranks, and was offered as {} of {} "
                    "of {}",
                    part.node_rank, part.nodes, part.local_size, offer.node_rank, offer.nodes,
                    offer.local_size));
  }
  if (part.sessions.size() != part.local_size) {
    return bad(fmt::format("has {} sessions", part.sessions.size()));
  }
  for (std::uint32_t local = 0; local < part.local_size; ++local) {
    const PeerSession& session = part.sessions[local];
    if (session.rank != part.node_rank * part.local_size + local) {
      return bad(fmt::format("has rank {} at local rank {}", session.rank, local));
    }
    if (session.slot >= shm::kSessionsMax || session.flag_count < shm::kFlagGranule ||
        session.flag_count > shm::kFlagsMax || session.flags_key.size() > kKeyBytesMax) {
      return bad(fmt::format("has rank {} with slot {}, {} flags, and a key of {} bytes",
                             session.rank, session.slot, session.flag_count,
                             session.flags_key.size()));
    }
    if (session.rail >= rails) {
      return bad(fmt::format("has rank {} on rail {} of {}", session.rank, session.rail, rails));
    }
  }
  return {};
}

}  // namespace

Bytes ControlPlane::Impl::make_nonce() {
  Bytes nonce(kNonceBytes);
  // A simulator's runs repeat.
  if (options_.random_seed == 0 &&
      ::getrandom(nonce.data(), nonce.size(), 0) == static_cast<ssize_t>(nonce.size())) {
    return nonce;
  }
  for (std::byte& byte : nonce) byte = static_cast<std::byte>(random_());
  return nonce;
}

void ControlPlane::Impl::announce(Job& job) {
  if (job.nodes == 1) return;
  tell_rails();  // before anybody connects because of the part
  const JobOffer offer = job.own_offer();
  const bool again = now_() >= job.next_announce_ns;
  for (const auto& [node, peer] : peers_) {
    if (!peer.up || (job.told.contains(node) && !again)) continue;
    if (!transport_.send(node, offer)) continue;
    job.told.insert(node);
    job.announced_to.insert(node);
  }
  if (again) job.next_announce_ns = now_() + kAnnounceIntervalNs;
}

ProofParty ControlPlane::Impl::own_side(const Job& job) const {
  return {.node = options_.node, .uid = job.uid, .part_id = job.part_id, .nonce = job.nonce};
}

void ControlPlane::Impl::meet(Job& job, NodeId node) {
  if (job.ending || job.state != JobState::kAnnounced || job.part_from(node) != nullptr) return;
  // It answers our offer, so it must have that first.
  if (!job.told.contains(node)) return;
  PeerState& peer = peers_.at(node);
  const auto found = peer.offers.find(job.name);
  if (found == peer.offers.end()) return;
  const JobOffer& offer = found->second.offer;
  // Another user's job of that name is none of ours, whatever becomes of it: it fails nobody.
  if (!job.check_owner(offer)) return;
  const auto known = job.met.find(node);
  if (known != job.met.end() && known->second.part_id == offer.part_id) return;
  const ProofParty own = own_side(job);
  const ProofParty theirs{node, offer.uid, offer.part_id, offer.nonce};
  job.met.insert_or_assign(node, Meeting{offer.part_id, false, {}});
  found->second.met = true;
  (void)transport_.send(node, JobProof{job.name, job.part_id, offer.part_id,
                                       job_proof(job.secret_digest, job.name, own, theirs)});
  check_proof(job, node);
}

void ControlPlane::Impl::meet_all(Job& job) {
  for (const auto& [node, peer] : peers_) {
    if (peer.up) meet(job, node);
  }
}

void ControlPlane::Impl::check_proof(Job& job, NodeId node) {
  const PeerState& peer = peers_.at(node);
  const auto met = job.met.find(node);
  const auto found = peer.offers.find(job.name);
  if (job.ending || met == job.met.end() || met->second.proved || found == peer.offers.end()) {
    return;
  }
  const JobOffer& offer = found->second.offer;
  const std::optional<JobProof>& proof = found->second.proof;
  // Of another run of the job, there or here: that run's end has come, or is on its way.
  if (offer.part_id != met->second.part_id || !proof || proof->peer_part_id != job.part_id) return;
  const ProofParty theirs{node, offer.uid, offer.part_id, offer.nonce};
  if (!same_proof(proof->proof, job_proof(job.secret_digest, job.name, theirs, own_side(job)))) {
    met->second.refused = fmt::format(
        "the ranks of job '{}' do not agree on its secret: they have another one there", job.name);
    log(LogLevel::kWarning,
        fmt::format("a part of {} was not taken: {}", describe_node(node), met->second.refused),
        {{"job", job.name}});
    return;
  }
  met->second.proved = true;
  if (Status fits = job.check_offer(offer); !fits) {
    const std::string text =
        fmt::format("{} disagrees: {}", describe_node(node), fits.error().message);
    fail_job(job, {fits.error().code, text}, {job.first_local_rank(), fits.error().code, text});
    return;
  }
  // If the stream is down, on_peer_down says so.
  (void)transport_.send(node, job.own_part());
}

Status ControlPlane::Impl::on(NodeId node, JobOffer& offer) {
  MK_RETURN_IF_ERROR(check_offer_shape(offer));
  PeerState& peer = peers_.at(node);
  const auto known = peer.offers.find(offer.job);
  const std::string name = offer.job;
  if (known == peer.offers.end() && peer.offers.size() >= kOffersMax) {
    return fail(ErrorCode::kProtocol, "it has announced {} jobs at once; at most {}",
                peer.offers.size() + 1, kOffersMax);
  }
  const auto current = by_name_.find(name);
  Job* job = current == by_name_.end() ? nullptr : current->second;
  if (job != nullptr) {
    if (const Status own = job->check_owner(offer); !own) {
      log(LogLevel::kWarning,
          fmt::format("a part of {} was not taken: {}", describe_node(node), own.error().message),
          {{"job", name}});
    }
  }
  if (known != peer.offers.end() && known->second.offer.part_id == offer.part_id) {
    known->second.received_ns = now_();  // made again
  } else {
    // It waits: for our local ranks, or for the job of that name to end here.
    peer.offers.insert_or_assign(name,
                                 PeerState::Offer{std::move(offer), now_(), std::nullopt, false});
  }
  if (job != nullptr) {
    meet(*job, node);
    advance(*job);
  }
  return {};
}

Status ControlPlane::Impl::on(NodeId node, JobProof& proof) {
  PeerState& peer = peers_.at(node);
  const auto found = peer.offers.find(proof.job);
  if (found == peer.offers.end() || found->second.offer.part_id != proof.part_id) return {};
  const std::string name = proof.job;
  found->second.proof = std::move(proof);
  const auto current = by_name_.find(name);
  if (current != by_name_.end()) check_proof(*current->second, node);
  return {};
}

Status ControlPlane::Impl::on(NodeId node, JobPart& part) {
  const auto current = by_name_.find(part.job);
  if (current == by_name_.end()) return {};  // it has ended here: the sender will hear of it
  Job& job = *current->second;
  const auto met = job.met.find(node);
  const PeerState& peer = peers_.at(node);
  const auto offered = peer.offers.find(part.job);
  if (met == job.met.end() || met->second.part_id != part.part_id || !met->second.proved ||
      offered == peer.offers.end()) {
    return {};
  }
  MK_RETURN_IF_ERROR(check_part(part, offered->second.offer, proxies_.size()));
  if (job.part_from(node) != nullptr || job.ending || job.state != JobState::kAnnounced) return {};
  const auto taken = job.parts.find(part.node_rank);
  if (taken != job.parts.end()) {
    const std::string text = fmt::format(
        "{} disagrees: job '{}' has its node rank {} there and on {}", describe_node(node),
        job.name, part.node_rank, describe_node(taken->second.node));
    fail_job(job, {ErrorCode::kAlreadyExists, text},
             {job.first_local_rank(), ErrorCode::kAlreadyExists, text});
    return {};
  }
  RemotePart remote;
  remote.node = node;
  remote.part = std::move(part);
  const std::uint32_t node_rank = remote.part.node_rank;
  job.parts.emplace(node_rank, std::move(remote));
  advance(job);
  return {};
}

std::size_t ControlPlane::Impl::offers_waiting() const {
  std::size_t waiting = 0;
  for (const auto& [node, peer] : peers_) {
    waiting += static_cast<std::size_t>(
        std::ranges::count_if(peer.offers, [](const auto& entry) { return !entry.second.met; }));
  }
  return waiting;
}

}  // namespace mk::daemon
