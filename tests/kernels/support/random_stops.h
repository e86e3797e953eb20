/// \file
/// Threads that fall behind at any point: while it lives, threads of this process are stopped at
/// random, for milliseconds and now and then for up to a second, in the middle of whatever they do.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

namespace mk::kernels::testing {

/// A stop is a signal whose handler sleeps; so what runs needs no hook for it, and system calls may
/// be interrupted. (ThreadSanitizer lets signals in at calls into libraries only: coarser.)
class RandomStops {
 public:
  explicit RandomStops(std::uint64_t seed);
  /// No thread is stopped any more, once those that are have gone on.
  ~RandomStops();
  RandomStops(const RandomStops&) = delete;
  RandomStops& operator=(const RandomStops&) = delete;

  std::uint32_t stops() const { return stops_.load(); }
  /// Of a tenth of a second and more.
  std::uint32_t long_stops() const { return long_stops_.load(); }

 private:
  void run(std::uint64_t seed);

  std::atomic<std::uint32_t> stops_{0};
  std::atomic<std::uint32_t> long_stops_{0};
  std::atomic<bool> quit_{false};
  std::thread thread_;  ///< last: it uses the rest
};

}  // namespace mk::kernels::testing
