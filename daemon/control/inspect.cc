#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "daemon/control/control_plane_impl.h"
#include "daemon/control/held_up.h"
#include "shm/layout.h"
#include "shm/limits.h"

namespace mk::daemon {

std::string ControlPlane::Impl::stopped_text(const Session& session) const {
  const std::uint64_t silent = session.silent_ns(now_());
  if (!session.active() || silent == 0) return {};
  return fmt::format("its process has not run for {:.1f} s: stopped, frozen or starved",
                     1e-9 * static_cast<double>(silent));
}

SessionInfo ControlPlane::Impl::info_of(const Session& session) const {
  SessionInfo info;
  info.session_id = session.id;
  info.slot = session.slot;
  info.job = session.attach.job;
  info.rank = session.attach.rank;
  info.world = session.attach.world;
  info.node_rank = session.attach.node_rank;
  info.nodes = session.attach.nodes;
  info.local_rank = session.attach.local_rank;
  info.local_size = session.attach.local_size;
  info.pid = session.credentials.pid;
  info.uid = session.credentials.uid;
  switch (session.state) {
    case SessionState::kWaiting:
      info.state = "waiting";
      break;
    case SessionState::kUp:
      info.state = "up";
      break;
    case SessionState::kLeaving:
      info.state = "draining";
      break;
    case SessionState::kFailed:
      info.state = "failed";
      break;
  }
  info.reason = session.failure.message;
  if (const std::string stopped = stopped_text(session); !stopped.empty()) info.reason = stopped;
  info.buffers = static_cast<std::uint32_t>(session.buffers.size());
  info.registered_bytes = session.registered_bytes;
  info.attached_for_ns = now_() - session.attached_ns;
  info.launches = session.launches_watched;
  info.rail = session.rail;
  info.gpu = session.attach.gpu;
  info.cpus = session.cpus;
  info.rail_why = session.rail_why;
  info.progress = session.progress.seen(now_());
  if (session.launches_since_ns != 0) info.launches_for_ns = now_() - session.launches_since_ns;
  return info;
}

std::uint64_t ControlPlane::Impl::age_of(const Job& job) const {
  return now_() - (job.deadline_ns - std::uint64_t{job.timeout_ms} * 1'000'000);
}

JobInfo ControlPlane::Impl::info_of(const Job& job) const {
  JobInfo info;
  info.name = job.name;
  info.nodes = job.nodes;
  info.local_size = job.local_size;
  info.node_rank = job.node_rank;
  info.age_ns = age_of(job);
  if (options_.job_share) {
    const JobShare share = options_.job_share(job.name);
    info.weight = share.weight;
    info.limit = share.limit;
  }
  for (const Session* session : job.sessions()) info.session_ids.push_back(session->id);
  std::vector<control::RankDoing> doing;
  for (const Session* session : job.sessions()) {
    if (session->state != SessionState::kUp) continue;
    doing.push_back({session->attach.rank, session->launches_watched % 2 == 1,
                     session->progress.seen(now_()), stopped_text(*session)});
  }
  info.held_up = control::held_up_text(doing);
  if (job.ending || job.state == JobState::kUp) {
    info.state = job.ending ? "ending" : "up";
    return info;
  }
  info.state = job.state == JobState::kGathering ? "gathering" : "connecting";
  info.waits_for = obstacles(job, info.missing_ranks);
  if (!info.waits_for.empty()) info.waits_for.erase(0, 2);
  return info;
}

ControlSnapshot ControlPlane::Impl::snapshot() const {
  ControlSnapshot snapshot;
  snapshot.draining = draining_;
  snapshot.sessions_attached = next_session_id_ - 1;
  snapshot.sessions_failed = sessions_failed_;
  snapshot.released = released_;
  snapshot.ended_jobs = ended_jobs_.list(now_());
  snapshot.operators = operator_totals_.list(now_());
  for (const auto& [id, session] : sessions_) {
    snapshot.sessions.push_back(info_of(*session));
    for (std::uint32_t lane = 0; lane < session->segment.shape().lane_count; ++lane) {
      const shm::LaneControl& control = *session->segment.ring(lane).control;
      QueueInfo& queue = snapshot.queues.emplace_back();
      queue.session_id = id;
      queue.lane = lane;
      queue.job = session->attach.job;
      queue.rank = session->attach.rank;
      const std::uint64_t depth =
          shm::load_relaxed(&control.produced) - shm::load_relaxed(&control.consumed);
      // `produced` is the client's word, and may lag behind what was taken.
      const std::uint64_t slots = 1ull << session->segment.shape().slot_count_log2;
      queue.depth = depth <= slots ? depth : 0;
      queue.stats = session->stats;
    }
  }
  for (const RecentFailure& one : recent_failures_) {
    snapshot.recent_failures.push_back(one.session);
    snapshot.recent_failures.back().failed_for_ns = now_() - one.ended_ns;
  }
  snapshot.links = links_.snapshot([this](NodeId node) { return describe_node(node); });
  for (const Job* job : jobs()) snapshot.jobs.push_back(info_of(*job));
  return snapshot;
}

ControlCounts ControlPlane::Impl::counts() const {
  ControlCounts counts;
  counts.clients = clients_.size();
  counts.sessions = sessions_.size();
  counts.jobs = jobs_.size();
  counts.early_parts = offers_waiting();
  counts.slots_used = by_slot_.size() - free_slots_.size();
  counts.links_up = links_.up_count();
  return counts;
}

}  // namespace mk::daemon
