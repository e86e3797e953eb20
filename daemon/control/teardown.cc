#include <algorithm>
#include <utility>

#include "daemon/control/control_plane_impl.h"
#include "daemon/plant.h"
#include "shm/atomic.h"
#include "shm/host/text.h"
#include "shm/limits.h"

namespace mk::daemon {

namespace {

/// When the memory of an ended job goes although another daemon has not said that it is done.
constexpr std::uint64_t kReleaseTimeoutNs = 10'000'000'000;
constexpr std::size_t kRecentFailuresMax = 32;

}  // namespace

void ControlPlane::Impl::fail_session(Session& session, const Error& error) {
  if (!session.active()) return;
  Job& job = *session.job;
  // First its own error, then the job's for the others.
  end_session(session, error);
  fail_job(job, lost_error(job, session.attach.rank, error.message),
           {session.attach.rank, error.code, error.message});
}

void ControlPlane::Impl::fail_job(Job& job, const Error& error, const Cause& cause,
                                  LogLevel level) {
  if (job.failed) return;
  job.failed = true;
  begin_ending(job);
  log(level, fmt::format("job '{}' failed: {}", job.name, error.message),
      {{"job", job.name}, {"code", error_code_name(error.code)}}, job.uid);
  for (Session* session : job.sessions()) end_session(*session, error);
  tell_left(job, cause.rank, cause.code == ErrorCode::kOk ? ErrorCode::kInternal : cause.code,
            cause.text);
}

void ControlPlane::Impl::tell_left(Job& job, std::uint32_t rank, ErrorCode code,
                                   const std::string& text) {
  if (MK_PLANT(others_not_told)) return;
  // Daemons before this one break the stream for a longer one.
  const std::string reason = shm::plain_text(text, shm::kMessageTextBytesMax);
  // Not only to those of whom we know that they have it: our announcement may have taken a stream
  // that was made anew before we heard that the last one had broken.
  for (const NodeId node : job.announced_to) {
    const RemotePart* held = job.part_from(node);
    // One that has not shown that it has a part of the job learns nothing of it.
    const auto met = job.met.find(node);
    const bool shares = met != job.met.end() && met->second.proved;
    // A node that cannot be told notices by itself that we are gone.
    (void)transport_.send(node, JobLeft{job.name, job.part_id, rank, code, shares ? reason : "",
                                        held != nullptr ? held->part.part_id : 0});
  }
}

Error ControlPlane::Impl::lost_error(const Job& job, std::uint32_t rank,
                                     const std::string& what) const {
  const std::uint32_t node_rank = rank / job.local_size;
  const auto part = job.parts.find(node_rank);
  const std::string where = node_rank == job.node_rank
                                ? fmt::format("this node ({})", options_.node)
                            : part != job.parts.end() ? describe_node(part->second.node)
                                                      : fmt::format("node rank {}", node_rank);
  return {ErrorCode::kPeerLost,
          fmt::format("job '{}' lost rank {} on {}: {}", job.name, rank, where, what)};
}

void ControlPlane::Impl::end_session(Session& session, const Error& cause) {
  // What fabrics and systems say is shown as their peers wrote it.
  const Error error{cause.code, shm::plain_text(cause.message, shm::kMessageTextBytesMax)};
  if (!session.active()) {
    // One that detaches has no error to see; but nobody takes what it still sends.
    fence(session);
    return;
  }
  session.state = SessionState::kFailed;
  session.failure = error;
  session.segment.publish_failure(error.code, error.message);
  record_failure(session);
  abort_requests(session, error);
  if (session.client) {
    Client& client = clients_.at(*session.client);
    client.state = Client::State::kEnded;
    client.failure = error;
    reply(*session.client, 0, shm::SessionFailed{error.code, error.message});
  }
  fence(session);
}

void ControlPlane::Impl::begin_ending(Job& job) {
  if (job.ending) return;
  job.ending = true;
  job.record.ended_ns = now_();
  job.record.ran_ns = age_of(job);
  by_name_.erase(job.name);
}

void ControlPlane::Impl::note_leave(Job& job, std::uint32_t rank, const std::string& leaver) {
  begin_ending(job);
  if (job.leavers.empty()) job.first_leaver = rank;
  job.leavers.insert_or_assign(rank, leaver);
}

void ControlPlane::Impl::miss_leaver(Job& job, std::uint32_t rank, const std::string& need) {
  const std::string what = fmt::format("{} detached{}", job.leavers.at(rank), need);
  fail_job(job, lost_error(job, rank, what), {rank, ErrorCode::kPeerLost, what},
           LogLevel::kWarning);
}

void ControlPlane::Impl::check_leavers(Job& job) {
  if (job.failed || !job.has_active()) return;
  for (const auto& [rank, leaver] : job.leavers) {
    const std::string* tag = job.exchange.round_without(rank);
    if (tag == nullptr) continue;
    miss_leaver(job, rank, fmt::format(" before the exchange '{}'", *tag));
    return;
  }
  if (job.leavers.empty()) return;
  // What the leavers owed to launches they took part in, they sent before they left. So a launch
  // that goes on and on is one they are missing from.
  for (Session* session : job.sessions()) {
    if (!session->active() || session->launch_age(now_()) < options_.leave_grace_ns) continue;
    miss_leaver(job, job.first_leaver,
                fmt::format(", and rank {} has been in one launch for {} ms since",
                            session->attach.rank, options_.leave_grace_ns / 1'000'000));
    return;
  }
}

void ControlPlane::Impl::fence(Session& session) {
  if (session.fenced) return;
  session.fenced = true;
  proxy_of(session).apply(FenceSession{session.slot});
}

void ControlPlane::Impl::on_drained(Session& session) {
  if (!session.fenced || session.drained) return;
  session.drained = true;
  release_withdrawn(session);
  finish_detach(session);
  Job& job = *session.job;
  if (!job.ending || job.has_active() || !job.drained() || job.gone_sent) return;
  job.gone_sent = true;
  job.release_deadline_ns = now_() + kReleaseTimeoutNs;
  tell_left(job, job.first_local_rank(), ErrorCode::kOk, "");
}

void ControlPlane::Impl::finish_detach(Session& session) {
  if (!session.detach_request || !session.client) return;
  const ClientId client = *std::exchange(session.client, std::nullopt);
  reply(client, *session.detach_request, shm::Done{});
  clients_.erase(client);
  clients_port_.close(client);
}

bool ControlPlane::Impl::releasable(const Session& session) const {
  if (!session.drained) return false;
  const Job& job = *session.job;
  if (MK_PLANT(memory_goes_early)) return true;
  return job.remote_gone() || (job.gone_sent && now_() >= job.release_deadline_ns);
}

void ControlPlane::Impl::release(Session& session) {
  if (session.client) {
    // It has failed and its client has not gone yet: that keeps its connection, nothing else.
    clients_.at(*session.client).session = nullptr;
  }
  Job& job = *session.job;
  if (!job.remote_gone()) {
    log(LogLevel::kWarning,
        fmt::format("released the memory of {} of job '{}' although another daemon may still "
                    "write to it",
                    session.describe(), job.name),
        session);
  }
  job.locals[session.attach.local_rank] = nullptr;
  by_slot_[session.slot] = nullptr;
  const bool late = proxy_of(session).endpoint().capabilities().contract ==
                        fabric::DeliveryContract::kUnordered &&
                    !job.remote_quiet();
  if (!MK_PLANT(slot_lost)) free_slots_.push_back({session.slot, late ? now_() + kSlotRestNs : 0});
  for (const LaneStats& lane : session.stats->lanes) {
    released_.add(lane);
    job.record.totals.add(lane);
  }
  watch_client(session);
  ++job.record.ranks;
  job.record.launches += shm::load_relaxed(&session.segment.header().launches) / 2;
  sessions_.erase(session.id);
}

void ControlPlane::Impl::reap() {
  heartbeats_.turn(now_());
  waited_ns_ = 0;
  for (auto next = sessions_.begin(); next != sessions_.end();) {
    Session& session = *next->second;
    ++next;
    if (releasable(session)) release(session);
  }
  std::erase_if(jobs_, [this](const auto& job) {
    if (!job->ending || !job->sessions().empty()) return false;
    job->record.name = job->name;
    job->record.uid = job->uid;
    job->record.failed = job->failed;
    ended_jobs_.add(std::move(job->record));
    return true;
  });
}

void ControlPlane::Impl::record_failure(const Session& session) {
  ++sessions_failed_;
  recent_failures_.push_back({now_(), info_of(session)});
  if (recent_failures_.size() > kRecentFailuresMax) recent_failures_.pop_front();
}

}  // namespace mk::daemon
