/// \file
/// The one warp of a rank that looks at the host's words (arrival flags, the lanes' counters, abort
/// words) while a launch runs, and mirrors them into device memory, where everybody else looks. A
/// look across the bus takes a microsecond, and many that look make it many more.
#pragma once

#include <cstdint>

#include "kernels/cuda/launch_state.h"
#include "kernels/cuda/ptx.cuh"
#include "shm/atomic.h"

namespace mk::kernels::cuda {

class Poller {
 public:
  /// `seen`: shared memory for `host.flag_count` words. All threads of one warp.
  __device__ Poller(const HostWords& host, DeviceState& state, std::uint32_t* seen)
      : host_(host), state_(state), seen_(reinterpret_cast<uint4*>(seen)), lane_(threadIdx.x % 32) {
    const auto* here = reinterpret_cast<const uint4*>(host.flags_here);
    for (std::uint32_t i = lane_; i < host.flag_count / 4; i += 32) seen_[i] = here[i];
    if (lane_ < host.lane_count) {
      consumed_ = state.controls[lane_].consumed;
      completed_ = state.controls[lane_].completed;
      produced_ = state.controls[lane_].produced;
    }
    __syncwarp();
  }

  /// Until `groups` groups have ended. So long the host sees a launch under way.
  __device__ void run(std::uint32_t groups) {
    count_launch();
    for (bool last = false; !last;) {
      // Before the last round: what a group has done before it ended is then brought to the host.
      last = __shfl_sync(0xffffffffu, shm::load_acquire(&state_.groups_done), 0) >= groups;
      round();
    }
    count_launch();
  }

 private:
  /// Once when a launch begins and once when it ends.
  __device__ void count_launch() {
    if (lane_ != 0 || host_.launches == nullptr) return;
    shm::store_relaxed(host_.launches, shm::load_relaxed(host_.launches) + 1);
  }

  __device__ void round() {
    // All loads of a step are on their way together.
    std::uint64_t consumed = consumed_;
    std::uint64_t completed = completed_;
    std::uint32_t abort = 0;
    if (lane_ < host_.lane_count) {
      consumed = shm::load_relaxed(&host_.controls[lane_]->consumed);
      completed = shm::load_relaxed(&host_.controls[lane_]->completed);
    }
    if (lane_ < 2 && host_.aborts[lane_] != nullptr) abort = shm::load_relaxed(host_.aborts[lane_]);
    const std::uint32_t vectors = host_.flag_count / 4;
    std::uint32_t first = 0;
    do {
      uint4 found[kBatch];
#pragma unroll
      for (std::uint32_t b = 0; b < kBatch; ++b) {
        const std::uint32_t i = first + b * 32 + lane_;
        if (i < vectors) found[b] = load_flags(host_.flags + 4 * i);
      }
      const bool counters =
          first == 0 && (consumed != consumed_ || completed != completed_ || abort != 0);
      bool changed = counters;
#pragma unroll
      for (std::uint32_t b = 0; b < kBatch; ++b) {
        const std::uint32_t i = first + b * 32 + lane_;
        if (i < vectors) changed = changed || differ(found[b], seen_[i]);
      }
      if (__any_sync(0xffffffffu, changed)) {
        // What lies behind the words is visible to this thread, and to who sees their mirrors.
        __threadfence_system();
        if (counters) mirror_counters(consumed, completed, abort);
#pragma unroll
        for (std::uint32_t b = 0; b < kBatch; ++b) {
          const std::uint32_t i = first + b * 32 + lane_;
          if (i < vectors && differ(found[b], seen_[i])) {
            seen_[i] = found[b];
            std::uint32_t* here = host_.flags_here + 4 * i;
            shm::store_relaxed(here + 0, found[b].x);
            shm::store_relaxed(here + 1, found[b].y);
            shm::store_relaxed(here + 2, found[b].z);
            shm::store_relaxed(here + 3, found[b].w);
          }
        }
      }
      first += kBatch * 32;
    } while (first < vectors);
    if (lane_ < host_.lane_count) {
      const std::uint64_t produced = shm::load_relaxed(&state_.controls[lane_].produced);
      if (produced != produced_) shm::store_relaxed(&host_.controls[lane_]->produced, produced);
      produced_ = produced;
    }
  }

  __device__ void mirror_counters(std::uint64_t consumed, std::uint64_t completed,
                                  std::uint32_t abort) {
    if (lane_ < host_.lane_count) {
      shm::store_relaxed(&state_.controls[lane_].consumed, consumed);
      shm::store_relaxed(&state_.controls[lane_].completed, completed);
      consumed_ = consumed;
      completed_ = completed;
    }
    if (lane_ < 2 && abort != 0) shm::store_relaxed(&state_.aborts[lane_], abort);
  }
  static __device__ uint4 load_flags(const std::uint32_t* words) {
    uint4 value;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(words)
                 : "memory");
    return value;
  }
  static __device__ bool differ(const uint4& a, const uint4& b) {
    return ((a.x ^ b.x) | (a.y ^ b.y) | (a.z ^ b.z) | (a.w ^ b.w)) != 0;
  }

  static constexpr std::uint32_t kBatch = 4;  ///< vectors of a thread in one step
  const HostWords& host_;
  DeviceState& state_;
  uint4* seen_;
  std::uint32_t lane_;
  std::uint64_t consumed_ = 0;
  std::uint64_t completed_ = 0;
  std::uint64_t produced_ = 0;
};

}  // namespace mk::kernels::cuda
