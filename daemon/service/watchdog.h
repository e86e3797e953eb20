/// \file
/// Whether a daemon is alive: what systemd's watchdog is fed by.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace mk::daemon {

/// One thread that must make progress: who it is, and a count that moves as long as it does.
struct Progress {
  std::string name;
  std::uint64_t count = 0;
};

/// Pure bookkeeping: compares counts with those seen when everybody had last moved.
class Watchdog {
 public:
  /// True when every count has moved since this last answered true: the watchdog may be fed. The
  /// first call only takes the counts, and answers true.
  bool all_moved(std::span<const Progress> progress) {
    std::vector<std::uint64_t> counts;
    stalled_.clear();
    for (std::size_t i = 0; i < progress.size(); ++i) {
      counts.push_back(progress[i].count);
      if (i < seen_.size() && seen_[i] == progress[i].count) stalled_.push_back(progress[i].name);
    }
    if (!stalled_.empty()) return false;
    seen_ = std::move(counts);
    return true;
  }
  /// Who had not moved when all_moved was last asked.
  const std::vector<std::string>& stalled() const { return stalled_; }

 private:
  std::vector<std::uint64_t> seen_;
  std::vector<std::string> stalled_;
};

}  // namespace mk::daemon
