/// \file
/// What jobs that have ended did here, for as long as people may ask.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "daemon/proxy/stats.h"

namespace mk::daemon {

/// One run of a job, over its ranks on this node.
struct EndedJob {
  std::string name;
  std::uint32_t uid = 0;
  std::uint32_t ranks = 0;         ///< that were here
  std::uint64_t ran_ns = 0;        ///< from its first attach here until it began to end
  std::uint64_t ended_ns = 0;      ///< when; of the control plane's clock
  std::uint64_t ended_for_ns = 0;  ///< how long ago, as `list` answers it
  bool failed = false;
  std::uint64_t launches = 0;  ///< the clients' word
  LaneTotals totals;
};

namespace control {

/// Not thread-safe.
class EndedJobs {
 public:
  /// Of all users together. Beyond it, the user with most of them loses the oldest one.
  static constexpr std::size_t kMax = 64;

  /// Each is kept for `keep_ns`; 0: none is.
  explicit EndedJobs(std::uint64_t keep_ns) : keep_ns_(keep_ns) {}

  void add(EndedJob job);
  /// Those of the last `keep_ns` before `now_ns`, the oldest first.
  std::vector<EndedJob> list(std::uint64_t now_ns) const;

 private:
  const std::uint64_t keep_ns_;
  std::deque<EndedJob> jobs_;  ///< the oldest first
};

}  // namespace control
}  // namespace mk::daemon
