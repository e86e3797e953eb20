#include "daemon/service/admin_trace.h"

#include <fmt/format.h>

#include "daemon/proxy/completion_tracker.h"
#include "daemon/service/admin_convert.h"
#include "daemon/service/time_limit.h"
#include "shm/flag.h"
#include "shm/progress.h"

namespace mk::daemon {
namespace {

using std::chrono::nanoseconds;
namespace v1 = ::mkernel::v1;

constexpr nanoseconds kDurationMin = std::chrono::milliseconds(1);
constexpr nanoseconds kDurationMax = std::chrono::seconds(60);
/// How often the recorders are emptied: they hold TraceBuffer::kRecords each.
constexpr nanoseconds kDrainInterval = std::chrono::milliseconds(10);
constexpr int kEventsPerChunk = 16'384;
/// A caller that does not read keeps the recorders on, and others waiting, for so long at most.
constexpr nanoseconds kUnreadMax = std::chrono::seconds(5);

v1::TraceEvent::Kind kind_of(TraceRecord::Kind kind) {
  switch (kind) {
    case TraceRecord::Kind::kPosted:
      return v1::TraceEvent::KIND_POSTED;
    case TraceRecord::Kind::kCompleted:
      return v1::TraceEvent::KIND_COMPLETED;
    case TraceRecord::Kind::kFailed:
      return v1::TraceEvent::KIND_FAILED;
    case TraceRecord::Kind::kArrived:
      return v1::TraceEvent::KIND_ARRIVED;
    case TraceRecord::Kind::kLaunch:
      return v1::TraceEvent::KIND_LAUNCH;
  }
  return v1::TraceEvent::KIND_UNSPECIFIED;
}

void to_proto(const TraceRecord& from, std::uint32_t rail, v1::TraceEvent& to) {
  to.set_kind(kind_of(from.kind));
  to.set_time_ns(from.time_ns);
  to.set_rail(rail);
  if (from.kind == TraceRecord::Kind::kArrived) {
    const auto immediate = static_cast<std::uint32_t>(from.cookie);
    to.set_slot(shm::immediate_slot(immediate));
    to.set_flag(shm::immediate_flag(immediate));
    return;
  }
  const Cookie cookie = Cookie::unpack(from.cookie);
  to.set_epoch(from.launch.epoch);
  if (from.kind == TraceRecord::Kind::kLaunch) {
    to.set_slot(cookie.slot);
    if (from.launch.op < shm::kProgressOperatorCount)
      to.set_op(std::string(shm::kProgressOperators[from.launch.op]));
    to.set_tag(from.launch.tag);
    to.set_m(from.launch.m);
    to.mutable_sizes()->Add(from.launch.sizes.begin(), from.launch.sizes.end());
    return;
  }
  to.set_link(from.link);
  to.set_write(from.cookie);
  to.set_slot(cookie.slot);
  to.set_lane(cookie.lane);
  to.set_sequence(cookie.sequence);
  to.set_bytes(from.bytes);
  to.set_waited_ns(from.waited_ns);
  to.set_batch(from.batch);
}

std::int64_t unix_minus_monotonic_ns() {
  const auto unix_ns = std::chrono::system_clock::now().time_since_epoch();
  return nanoseconds(unix_ns).count() - static_cast<std::int64_t>(shm::monotonic_ns());
}

}  // namespace

grpc::Status TraceRecorder::record(grpc::ServerContext& context,
                                   const v1::RecordTraceRequest& request,
                                   grpc::ServerWriter<v1::TraceChunk>& writer) {
  const std::uint64_t asked = request.duration_ns();
  if (asked < static_cast<std::uint64_t>(kDurationMin.count()) ||
      asked > static_cast<std::uint64_t>(kDurationMax.count())) {
    return {grpc::StatusCode::INVALID_ARGUMENT,
            fmt::format("duration_ns is {}; {} to {} is allowed", asked, kDurationMin.count(),
                        kDurationMax.count())};
  }
  if (busy_.exchange(true)) {
    return {grpc::StatusCode::RESOURCE_EXHAUSTED,
            "another caller records a trace now: try again when it has ended"};
  }
  for (std::uint32_t rail = 0; rail < node_.rails(); ++rail) node_.trace(rail).start();
  const nanoseconds duration(static_cast<std::int64_t>(asked));
  const grpc::Status status = [&] {
    // A write to a caller that does not read waits for ever.
    const TimeLimit limit(duration + kUnreadMax, "mk-trace-limit", [&] { context.TryCancel(); });
    return send(context, duration, writer);
  }();
  for (std::uint32_t rail = 0; rail < node_.rails(); ++rail) node_.trace(rail).stop();
  busy_.store(false);
  return status;
}

grpc::Status TraceRecorder::send(grpc::ServerContext& context, nanoseconds duration,
                                 grpc::ServerWriter<v1::TraceChunk>& writer) {
  v1::TraceChunk last;
  explain(last);  // sessions that end meanwhile are known, too
  const auto until = AdminStreams::Clock::now() + duration;
  while (AdminStreams::Clock::now() < until) {
    const auto next = std::min(until, AdminStreams::Clock::now() + kDrainInterval);
    if (!streams_.sleep_until(next, context)) {
      return {grpc::StatusCode::UNAVAILABLE, "the daemon is shutting down"};
    }
    if (context.IsCancelled() || !drain(writer)) return grpc::Status::CANCELLED;
  }
  for (std::uint32_t rail = 0; rail < node_.rails(); ++rail) {
    last.set_dropped(last.dropped() + node_.trace(rail).dropped());
  }
  explain(last);
  last.set_node(node_.id());
  last.set_unix_minus_monotonic_ns(unix_minus_monotonic_ns());
  return writer.Write(last) ? grpc::Status::OK : grpc::Status::CANCELLED;
}

bool TraceRecorder::drain(grpc::ServerWriter<v1::TraceChunk>& writer) {
  std::vector<TraceRecord> records;
  for (std::uint32_t rail = 0; rail < node_.rails(); ++rail) {
    records.clear();
    node_.trace(rail).take(records);
    v1::TraceChunk chunk;
    for (const TraceRecord& record : records) {
      to_proto(record, rail, *chunk.add_events());
      if (chunk.events_size() < kEventsPerChunk) continue;
      if (!writer.Write(chunk)) return false;
      chunk.Clear();
    }
    if (chunk.events_size() > 0 && !writer.Write(chunk)) return false;
  }
  return true;
}

void TraceRecorder::explain(v1::TraceChunk& chunk) {
  const auto snapshot = node_.snapshot();
  if (!snapshot) return;
  const auto known = [&chunk](std::uint32_t id) {
    return std::any_of(chunk.sessions().begin(), chunk.sessions().end(),
                       [id](const v1::Session& one) { return one.session_id() == id; });
  };
  for (const SessionInfo& session : snapshot->sessions) {
    if (!known(session.session_id)) to_proto(session, *chunk.add_sessions());
  }
  chunk.clear_links();
  for (const LinkInfo& link : snapshot->links) {
    if (link.state != "up") continue;
    v1::TraceLink& one = *chunk.add_links();
    one.set_rail(link.rail);
    one.set_link(link.id);
    one.set_peer(link.peer);
  }
}

}  // namespace mk::daemon
