/// \file
/// A warp that copies by its own loads and stores: the executor of gather::share for a warp which
/// has nothing else to do and no shared memory to copy through, as a compute block's io warpgroup
/// has one. All its lanes run the role together (Block::kTogether): each asks itself the same
/// questions, gets the same answers (`agree`), and stores the same flags; only of a copy each has
/// its own share.
#pragma once

#include <cstdint>

#include "kernels/cuda/executor_common.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/gather/copy_job.h"

namespace mk::kernels::cuda {

class CopyWarp {
 public:
  /// All lanes of a warp construct and use it.
  __device__ explicit CopyWarp(DeviceState& state) : state_(state) {}

  /// Each piece is read once and written to every target; all sizes and addresses are multiples of
  /// 16 bytes.
  __device__ void copy(const CopyJob& job) {
    const std::byte* source = job.source;
    std::uint64_t target = 0;
#pragma unroll 1
    for (std::uint32_t row = 0; row < job.rows; ++row) {
      copy_run(job, source, target, job.row_bytes);
      source += job.source_stride;
      target += job.target_stride;
    }
  }
  /// What all lanes stored is visible to who acquires the next release of any of them.
  __device__ void stores_done() { __syncwarp(); }
  __device__ void loads_begin() {}
  /// Whether it is so for all lanes.
  __device__ bool agree(bool here) { return __all_sync(kLanes, here) != 0; }
  __device__ bool last_part(Role role, std::uint32_t chunk, std::uint32_t parts) {
    std::uint32_t last = 0;
    if (threadIdx.x % 32 == 0) last = count_part(state_, role, chunk, parts) ? 1 : 0;
    return __shfl_sync(kLanes, last, 0) != 0;
  }
  __device__ void publish_within_rank(std::uint32_t* flag, std::uint32_t epoch) {
    ptx::store_release_gpu(flag, epoch);
  }
  static __device__ std::uint64_t now_ns() { return ptx::now_ns(); }
  static __device__ bool pause(std::uint32_t attempt) { return look_at_clock(attempt); }

 private:
  static constexpr std::uint32_t kLanes = 0xffffffffu;
  /// Loads of 16 bytes of each lane that are on their way at one time: as many as the io warps'
  /// registers hold. They come from L2, where the whole run is brought beforehand: from memory they
  /// would take twice as long. (Past L1: others write and read the same lines.)
  static constexpr std::uint32_t kAtOnce = 3;

  static __device__ void copy_run(const CopyJob& job, const std::byte* source, std::uint64_t target,
                                  std::uint32_t bytes) {
    constexpr std::uint32_t kStep = 32 * sizeof(uint4);
    if (threadIdx.x % 32 == 0) ptx::prefetch_run(source, bytes);
#pragma unroll 1
    for (std::uint32_t at = threadIdx.x % 32 * sizeof(uint4); at < bytes; at += kAtOnce * kStep) {
      uint4 loaded[kAtOnce];
      // Beyond the end the first once more: loads under a condition would wait for each other.
#pragma unroll
      for (std::uint32_t i = 0; i < kAtOnce; ++i) {
        const std::uint32_t from = at + i * kStep < bytes ? at + i * kStep : at;
        loaded[i] = __ldcg(reinterpret_cast<const uint4*>(source + from));
      }
#pragma unroll 1
      for (std::uint32_t t = 0; t < job.target_count; ++t) {
        std::byte* const to = job.targets[t] + target + at;
#pragma unroll
        for (std::uint32_t i = 0; i < kAtOnce; ++i) {
          if (at + i * kStep < bytes) __stcg(reinterpret_cast<uint4*>(to + i * kStep), loaded[i]);
        }
      }
    }
  }

  DeviceState& state_;
};

}  // namespace mk::kernels::cuda
