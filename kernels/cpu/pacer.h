/// \file
/// How a waiting block of the CPU executor passes the time (the pacer of comm/wait.h).
#pragma once

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <cstdint>

namespace mk::kernels {

/// Spins for about a microsecond, then yields, then sleeps 20 to 100 µs at a time: ranks
/// oversubscribe CPUs, and the one that is waited for may need this very core.
struct CpuPacer {
  static constexpr std::uint32_t kSpins = 64;
  static constexpr std::uint32_t kYields = 16;

  static std::uint64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000u +
           static_cast<std::uint64_t>(now.tv_nsec);
  }

  static bool pause(std::uint32_t attempt) {
    if (attempt < kSpins) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
      return false;
    }
    if (attempt < kSpins + kYields) {
      sched_yield();
      return false;
    }
    const std::uint32_t sleeps = attempt - kSpins - kYields;
    timespec nap{0, 1000 * static_cast<long>(std::min<std::uint32_t>(20 + sleeps, 100))};
    nanosleep(&nap, nullptr);
    return true;
  }
};

}  // namespace mk::kernels
