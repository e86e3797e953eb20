/// \file
/// How the reloads of a daemon's configuration ended. Thread-safe.
#pragma once

#include <fmt/format.h>

#include <mutex>
#include <string>
#include <vector>

#include "daemon/metrics/metrics.h"

namespace mk::daemon {

class ReloadRecord {
 public:
  /// `refused`: why a reload was refused; empty: it was not.
  void note(const std::string& refused) {
    std::lock_guard lock(mutex_);
    ++(refused.empty() ? metrics_.succeeded : metrics_.refused);
    metrics_.last_succeeded = refused.empty();
    refused_ = refused;
  }
  ReloadMetrics metrics() const {
    std::lock_guard lock(mutex_);
    return metrics_;
  }
  /// That the last one was refused, if it was.
  std::vector<std::string> problems() const {
    std::lock_guard lock(mutex_);
    if (refused_.empty()) return {};
    return {fmt::format(
        "the last reload was refused: {}; mkctl config diff shows what the file would change",
        refused_)};
  }

 private:
  mutable std::mutex mutex_;
  ReloadMetrics metrics_;
  std::string refused_;  ///< why, until the next good one
};

}  // namespace mk::daemon
