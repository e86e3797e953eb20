/// \file
/// One run of a job as this node sees it: its local ranks, the other nodes' parts, and how far the
/// rendezvous has come. A job that has begun to end gives its name up at once, so that a restart
/// under the same name is a job of its own and never mixes with it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/control/ended_jobs.h"
#include "daemon/control/exchange.h"
#include "daemon/control/peer_transport.h"
#include "daemon/control/session.h"

namespace mk::daemon::control {

/// Another node's part of the job.
struct RemotePart {
  NodeId node = 0;
  JobPart part;
  bool ready = false;                           ///< its JobReady is in
  bool gone = false;                            ///< nothing of it can write here any more
  bool quiet = false;                           ///< gone, by its own word
  std::vector<RegionAnnounce> regions_waiting;  ///< announced before they could be bound
  /// Put before the job was up here: they count once this part is known to be with ours.
  std::vector<ExchangePart> exchanges_waiting;

  /// kProtocol unless the rank is one of the part's own; `what`: "a buffer".
  Status check_rank(std::uint32_t rank, const char* what) const;
};

/// How far we have got with another node that has offered a part of the job.
struct Meeting {
  std::uint64_t part_id = 0;  ///< of its offer, which we have answered with our proof
  bool proved = false;        ///< its proof was right: it has our part
  std::string refused;        ///< why it was not; for users
};

enum class JobState {
  kGathering,  ///< local ranks are missing
  kAnnounced,  ///< all local ranks are here, our part is on its way; others' parts are missing
  kBound,      ///< all parts are here and bound; others are not ready yet
  kUp,
};

struct Job {
  /// `owner`: the user of `first`.
  Job(const shm::Attach& first, std::uint32_t owner, std::uint64_t part, Bytes fresh_nonce);

  std::uint32_t world() const { return nodes * local_size; }
  std::uint32_t first_local_rank() const { return node_rank * local_size; }
  bool is_local(std::uint32_t rank) const { return rank / local_size == node_rank; }
  /// The local session of a rank, or null.
  Session* session_of(std::uint32_t rank) const;
  std::vector<Session*> sessions() const;
  bool all_local_here() const;
  bool has_active() const;
  /// Whether all sessions that attached have ended and nothing of them is in flight.
  bool drained() const;
  /// Whether no rank of another node can write to this node's memory any more.
  bool remote_gone() const;
  /// Whether the other nodes have said so themselves: nothing of them is on its way either.
  bool remote_quiet() const;
  RemotePart* part_from(NodeId node);
  /// Our part, as all daemons hear of it, and as those get it that have shown that it is theirs.
  JobOffer own_offer() const;
  JobPart own_part() const;
  /// Why a part of another node is not this job's at all: another user's, or of another secret.
  Status check_owner(const JobOffer& offer) const;
  /// Why a part of another node does not fit this job.
  Status check_offer(const JobOffer& offer) const;
  /// Ranks without whom it cannot be up: local ones not attached, all of nodes without a part.
  std::vector<std::uint32_t> missing_ranks() const;

  const std::string name;
  const std::uint64_t part_id;
  const Bytes nonce;
  const std::uint32_t uid;    ///< of all its ranks, on all nodes
  const Bytes secret_digest;  ///< empty: it has no secret
  const std::uint32_t nodes, local_size, node_rank;

  /// Of local rank 0, if it has its rail by its number; once a rank has one so.
  std::optional<std::uint32_t> first_rail;
  JobState state = JobState::kGathering;
  std::vector<Session*> locals;               ///< by local rank; null: not attached, or released
  std::map<std::uint32_t, RemotePart> parts;  ///< by node rank
  std::map<NodeId, Meeting> met;              ///< with whom we are about to share it, or do
  std::set<NodeId> told;                      ///< daemons that have our offer
  std::set<NodeId> announced_to;              ///< that may have it: who hears of its end
  std::uint64_t next_announce_ns = 0;
  std::uint64_t deadline_ns = 0;  ///< of the rendezvous
  std::uint32_t timeout_ms = 0;
  ExchangeTable exchange;
  std::vector<ExchangePart> exchange_unsent;  ///< put before the job was up

  // The end, in the order in which it happens.
  bool ending = false;                           ///< the name is free; no rank can join
  std::map<std::uint32_t, std::string> leavers;  ///< ranks that left in order, for users
  std::uint32_t first_leaver = 0;                ///< when there are any
  bool failed = false;
  EndedJob record;                        ///< filled while its sessions go
  bool gone_sent = false;                 ///< the others know that our part is gone
  std::uint64_t release_deadline_ns = 0;  ///< when the memory goes, whatever the others say
};

}  // namespace mk::daemon::control
