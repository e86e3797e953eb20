#include "daemon/control/job.h"

#include <algorithm>

#include "daemon/control/job_secret.h"
#include "shm/layout.h"
#include "shm/limits.h"

namespace mk::daemon::control {

Job::Job(const shm::Attach& first, std::uint32_t owner, std::uint64_t part, Bytes fresh_nonce)
    : name(first.job),
      part_id(part),
      nonce(std::move(fresh_nonce)),
      uid(owner),
      secret_digest(job_secret_digest(first.job, first.secret)),
      nodes(first.nodes),
      local_size(first.local_size),
      node_rank(first.node_rank),
      locals(first.local_size, nullptr),
      timeout_ms(first.timeout_ms),
      exchange(first.nodes * first.local_size, first.local_size) {}

Status RemotePart::check_rank(std::uint32_t rank, const char* what) const {
  if (rank / part.local_size == part.node_rank) return {};
  return fail(ErrorCode::kProtocol, "{} for rank {} of job '{}', which is not on node rank {}",
              what, rank, part.job, part.node_rank);
}

Session* Job::session_of(std::uint32_t rank) const {
  return rank < world() && is_local(rank) ? locals[rank % local_size] : nullptr;
}

std::vector<Session*> Job::sessions() const {
  std::vector<Session*> here;
  std::ranges::copy_if(locals, std::back_inserter(here), [](Session* s) { return s != nullptr; });
  return here;
}

bool Job::all_local_here() const {
  return std::ranges::all_of(locals, [](Session* session) { return session != nullptr; });
}

bool Job::has_active() const {
  return std::ranges::any_of(locals, [](Session* s) { return s != nullptr && s->active(); });
}

bool Job::drained() const {
  return std::ranges::all_of(locals, [](Session* s) { return s == nullptr || s->drained; });
}

bool Job::remote_gone() const {
  return std::ranges::all_of(parts, [](const auto& entry) { return entry.second.gone; });
}

bool Job::remote_quiet() const {
  return std::ranges::all_of(parts, [](const auto& entry) { return entry.second.quiet; });
}

RemotePart* Job::part_from(NodeId node) {
  for (auto& [rank, part] : parts) {
    if (part.node == node) return &part;
  }
  return nullptr;
}

JobOffer Job::own_offer() const {
  return {.job = name,
          .part_id = part_id,
          .node_rank = node_rank,
          .nodes = nodes,
          .local_size = local_size,
          .uid = uid,
          .has_secret = !secret_digest.empty(),
          .nonce = nonce};
}

JobPart Job::own_part() const {
  JobPart part;
  part.job = name;
  part.part_id = part_id;
  part.node_rank = node_rank;
  part.nodes = nodes;
  part.local_size = local_size;
  for (const Session* session : sessions()) {
    part.sessions.push_back({session->attach.rank, session->slot,
                             session->segment.shape().flag_count, session->flags_region->key(),
                             session->rail});
  }
  return part;
}

Status Job::check_owner(const JobOffer& offer) const {
  if (offer.uid != uid) {
    return fail(ErrorCode::kPermission, "job '{}' belongs to user {} there, and to user {} here",
                name, offer.uid, uid);
  }
  if (offer.has_secret == secret_digest.empty()) {
    return fail(ErrorCode::kPermission,
                "the ranks of job '{}' do not agree on its secret: they have {} there", name,
                offer.has_secret ? "one" : "none");
  }
  return {};
}

Status Job::check_offer(const JobOffer& offer) const {
  if (offer.nodes != nodes || offer.local_size != local_size) {
    return fail(ErrorCode::kInvalidArgument,
                "job '{}' has {} nodes of {} ranks there, and {} nodes of {} ranks here", name,
                offer.nodes, offer.local_size, nodes, local_size);
  }
  if (offer.node_rank == node_rank) {
    return fail(ErrorCode::kAlreadyExists, "job '{}' has its node rank {} there and here", name,
                node_rank);
  }
  return {};
}

std::vector<std::uint32_t> Job::missing_ranks() const {
  std::vector<std::uint32_t> missing;
  for (std::uint32_t rank = 0; rank < world(); ++rank) {
    const bool here =
        is_local(rank) ? session_of(rank) != nullptr : parts.contains(rank / local_size);
    if (!here) missing.push_back(rank);
  }
  return missing;
}

}  // namespace mk::daemon::control
