/// \file
/// When a launch comes after a pause, so that the daemon's threads may sleep. Pure.
#pragma once

#include <atomic>
#include <cstdint>

namespace mk::client {

class LaunchPauses {
 public:
  /// Launches that begin closer together find the threads awake, or nearly so: they sleep for an
  /// eighth of the time that they have had nothing to do.
  static constexpr std::uint64_t kPauseNs = 5'000'000;

  /// A launch begins; answers whether it is the first, or no other has begun for a pause. Any
  /// thread.
  bool begins(std::uint64_t now_ns) {
    const std::uint64_t last_ns = last_ns_.exchange(now_ns, std::memory_order_relaxed);
    return last_ns == 0 || (now_ns > last_ns && now_ns - last_ns >= kPauseNs);
  }

 private:
  std::atomic<std::uint64_t> last_ns_{0};
};

}  // namespace mk::client
