/// \file
/// How long a proxy with nothing to do may sleep: pure arithmetic over the clock.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

namespace mk::daemon {

/// Hot polling for `spin_ns` after the last work. Then sleeps of an eighth of the time that was
/// idle so far, up to `sleep_ns_max`; after seconds of idleness longer ones, up to kLongSleeps
/// times that. So a sleep never delays new work by more than an eighth of the pause before it (a
/// thousandth, once beyond `sleep_ns_max`). A thread that stays idle ends with a few hundred
/// wake-ups a second.
class IdleBackoff {
 public:
  /// Below this a sleep costs more than the polls it saves.
  static constexpr std::uint64_t kSleepMinNs = 2'000;
  static constexpr std::uint64_t kLongSleeps = 8;

  IdleBackoff(std::uint64_t spin_ns, std::uint64_t sleep_ns_max)
      : spin_ns_(spin_ns), sleep_ns_max_(sleep_ns_max) {}

  void on_work(std::uint64_t now_ns) { last_work_ns_ = now_ns; }

  /// How long to sleep before the next pass; 0: poll again at once. `due_ns`: when there is
  /// something to do again whatever comes from outside (0: at once); nullopt: nothing is known.
  std::uint64_t sleep_ns(std::uint64_t now_ns, std::optional<std::uint64_t> due_ns) const {
    const std::uint64_t idle_ns = now_ns - std::min(now_ns, last_work_ns_);
    if (idle_ns < spin_ns_) return 0;
    std::uint64_t sleep = std::min(std::max(idle_ns / 8, kSleepMinNs), sleep_ns_max_);
    sleep = std::max(sleep, std::min(idle_ns / 1024, kLongSleeps * sleep_ns_max_));
    if (due_ns) sleep = std::min(sleep, *due_ns - std::min(*due_ns, now_ns));
    return sleep < kSleepMinNs ? 0 : sleep;
  }

 private:
  std::uint64_t spin_ns_;
  std::uint64_t sleep_ns_max_;
  std::uint64_t last_work_ns_ = 0;
};

}  // namespace mk::daemon
