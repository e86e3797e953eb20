/// \file
/// The Admin calls that go on: how many at once, at what pace, and their end when the service
/// stops.
#pragma once

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>

namespace mk::daemon {

class AdminStreams {
 public:
  using Clock = std::chrono::steady_clock;

  /// What one caller may ask for.
  static constexpr std::chrono::nanoseconds kIntervalDefault = std::chrono::seconds(1);
  static constexpr std::chrono::nanoseconds kIntervalMin = std::chrono::milliseconds(100);
  static constexpr std::chrono::nanoseconds kIntervalMax = std::chrono::seconds(60);

  /// `callers_max`: streams at once.
  explicit AdminStreams(std::uint32_t callers_max) : callers_max_(callers_max) {}

  /// Calls `take` at once and then once per interval, until it is no longer OK, `samples` (0: no
  /// end) are out, the caller cancels or the service stops; each caller at its own pace. A caller
  /// that reads slowly misses samples; they are not caught up on. INVALID_ARGUMENT for a bad
  /// interval (0: 1 s), RESOURCE_EXHAUSTED when there are too many callers.
  grpc::Status run(grpc::ServerContext& context, std::uint64_t interval_ns, std::uint32_t samples,
                   const std::function<grpc::Status()>& take);

  /// False when the service stops; returns early when the caller cancels.
  bool sleep_until(Clock::time_point until, const grpc::ServerContext& context);

  /// Ends all streams (UNAVAILABLE), also those to come.
  void stop();

 private:
  const std::uint32_t callers_max_;
  std::mutex mutex_;
  std::condition_variable stopped_;
  bool stopping_ = false;
  std::uint32_t callers_ = 0;
};

}  // namespace mk::daemon
