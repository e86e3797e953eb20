/// \file
/// A pace for what one thread writes beside a product: where links are full, its stores stand in
/// their SM's way out, and the loads of the next tile behind them.
#pragma once

#include <cstdint>

#include "kernels/cuda/core/ptx.cuh"

namespace mk::kernels::cuda {

/// Turns that follow each other at their time at the earliest.
class Pace {
 public:
  /// `behind_ns`: a worker that was held up (by a wait, by full links) makes up for so much at
  /// most: it would do so together with all others.
  __device__ explicit Pace(std::uint32_t behind_ns) : behind_ns_(behind_ns), due_ns_(clock_ns()) {}

  /// Waits for this turn's time; the next one is `ns` later.
  __device__ void take(std::uint32_t ns) {
    std::uint32_t ahead_ns = due_ns_ - clock_ns();
    for (; ahead_ns - 1 < kAheadNsMost; ahead_ns = due_ns_ - clock_ns()) __nanosleep(200);
    if (0 - ahead_ns > behind_ns_) due_ns_ -= ahead_ns + behind_ns_;
    due_ns_ += ns;
  }

 private:
  /// More than a turn's time: what seems more ahead is behind.
  static constexpr std::uint32_t kAheadNsMost = 1'000'000'000;

  /// Turns over every four seconds. (64 bits are a register more.)
  static __device__ std::uint32_t clock_ns() { return static_cast<std::uint32_t>(ptx::now_ns()); }

  const std::uint32_t behind_ns_;
  std::uint32_t due_ns_;
};

}  // namespace mk::kernels::cuda
