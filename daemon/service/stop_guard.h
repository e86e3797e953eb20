/// \file
/// An end for a shutdown that does not end.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "daemon/control/node.h"

namespace mk::daemon {

/// Every step of a shutdown has a deadline of its own. A step that misses it all the same (a driver
/// or a library that does not return) must not keep a node's restart waiting. While it lives, it
/// watches: after `limit` it calls `end` with a sentence that names the step, on a thread of its
/// own.
class StopGuard {
 public:
  /// `end` is to log and end the process. `phase` outlives this.
  StopGuard(std::chrono::nanoseconds limit, const StopPhase& phase,
            std::function<void(const std::string&)> end);
  /// All went well.
  ~StopGuard();
  StopGuard(const StopGuard&) = delete;
  StopGuard& operator=(const StopGuard&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace mk::daemon
