/// \file
/// An end for a shutdown that does not end.
#pragma once

#include <chrono>
#include <functional>
#include <string>

#include "daemon/control/node.h"
#include "daemon/service/time_limit.h"

namespace mk::daemon {

/// Every step of a shutdown has a deadline of its own. A step that misses it all the same (a driver
/// or a library that does not return) must not keep a node's restart waiting. While it lives, it
/// watches: after `limit` it calls `end` with a sentence that names the step (TimeLimit).
class StopGuard {
 public:
  /// `end` is to log and end the process. `phase` outlives this.
  StopGuard(std::chrono::nanoseconds limit, const StopPhase& phase,
            std::function<void(const std::string&)> end);

 private:
  TimeLimit limit_;
};

}  // namespace mk::daemon
