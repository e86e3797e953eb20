#include "daemon/service/admin_streams.h"

#include <fmt/format.h>

#include <algorithm>

namespace mk::daemon {
namespace {

/// How soon a stream notices that its caller has gone.
constexpr std::chrono::nanoseconds kCancelPoll = std::chrono::milliseconds(200);

}  // namespace

grpc::Status AdminStreams::run(grpc::ServerContext& context, std::uint64_t interval_ns,
                               std::uint32_t samples, const std::function<grpc::Status()>& take) {
  if (interval_ns != 0 && (interval_ns < static_cast<std::uint64_t>(kIntervalMin.count()) ||
                           interval_ns > static_cast<std::uint64_t>(kIntervalMax.count()))) {
    return {grpc::StatusCode::INVALID_ARGUMENT,
            fmt::format("interval_ns is {}; 0 (1 s) or {} to {} is allowed", interval_ns,
                        kIntervalMin.count(), kIntervalMax.count())};
  }
  const std::chrono::nanoseconds interval =
      interval_ns == 0 ? kIntervalDefault
                       : std::chrono::nanoseconds(static_cast<std::int64_t>(interval_ns));
  {
    std::lock_guard lock(mutex_);
    if (callers_ >= callers_max_) {
      return {grpc::StatusCode::RESOURCE_EXHAUSTED,
              fmt::format("{} callers watch already, more are not allowed", callers_max_)};
    }
    ++callers_;
  }
  grpc::Status status;
  Clock::time_point next = Clock::now();
  for (std::uint32_t count = 0; status.ok() && (samples == 0 || count < samples); ++count) {
    if (count > 0 && !sleep_until(next, context)) {
      status = {grpc::StatusCode::UNAVAILABLE, "the daemon is shutting down"};
    } else {
      status = context.IsCancelled() ? grpc::Status::CANCELLED : take();
    }
    next = std::max(next + interval, Clock::now());
  }
  std::lock_guard lock(mutex_);
  --callers_;
  return status;
}

bool AdminStreams::sleep_until(Clock::time_point until, const grpc::ServerContext& context) {
  std::unique_lock lock(mutex_);
  while (!stopping_ && !context.IsCancelled()) {
    const auto wake = std::min(until, Clock::now() + kCancelPoll);
    stopped_.wait_until(lock, wake, [this] { return stopping_; });
    if (Clock::now() >= until) break;
  }
  return !stopping_;
}

void AdminStreams::stop() {
  std::lock_guard lock(mutex_);
  stopping_ = true;
  stopped_.notify_all();
}

}  // namespace mk::daemon
