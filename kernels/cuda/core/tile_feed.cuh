/// \file
/// Tiles that are taken at run time: by a block's loading thread, which tells the block's other
/// warps. Blocks that come late, or whose tiles came late, then take fewer.
#pragma once

#include <cstdint>

#include "kernels/cuda/core/ptx.cuh"
#include "kernels/cuda/core/tile.h"
#include "shm/atomic.h"

namespace mk::kernels::cuda {

/// In shared memory, a ring: as many tiles as the loads may be ahead of the stores. `TileType` is
/// the order's (TileOf).
template <class TileType>
struct TileFeed {
  static constexpr int kSlots = 8;
  std::uint64_t known[kSlots];  ///< to the readers: the slot holds the next tile
  std::uint64_t read[kSlots];   ///< to the loads: all readers have read it
  TileType tiles[kSlots];       ///< m < 0: there are no more

  /// One thread, before the block's first barrier.
  __device__ void begin(std::uint32_t readers) {
    for (int slot = 0; slot < kSlots; ++slot) {
      ptx::mbarrier_init(&known[slot], 1);
      ptx::mbarrier_init(&read[slot], readers);
    }
  }
  /// The loading thread's: tile `number` is this one; `more` false: there are no more.
  __device__ void put(std::uint32_t number, bool more, const TileType& tile) {
    const std::uint32_t slot = number % kSlots;
    ptx::mbarrier_wait(&read[slot], number / kSlots % 2 ^ 1);
    tiles[slot] = tile;
    if (!more) tiles[slot].m = -1;
    ptx::mbarrier_arrive(&known[slot]);
  }
  /// A reader's, a thread or a whole warp: false: there are no more.
  __device__ bool get(std::uint32_t number, TileType* tile, bool whole_warp) {
    const std::uint32_t slot = number % kSlots;
    ptx::mbarrier_wait(&known[slot], number / kSlots % 2);
    *tile = tiles[slot];
    if (whole_warp) __syncwarp();
    if (!whole_warp || threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&read[slot]);
    return tile->m >= 0;
  }
};

/// Takes a worker's next step of `steps`; false: none is left. The first `workers` steps are the
/// workers' first. The rest goes to the first free one, late workers (from `workers` on) among
/// them. `taken`: in device memory, zero at the launch's start.
__device__ __forceinline__ bool take_step(bool first, std::uint32_t worker, std::uint32_t workers,
                                          std::uint32_t* taken, std::uint32_t steps,
                                          std::uint32_t* step) {
  *step = first && worker < workers ? worker : workers + atomicAdd(taken, 1u);
  return *step < steps;
}
/// Whether all have been taken: a worker that has one has its last.
__device__ __forceinline__ bool all_taken(std::uint32_t workers, const std::uint32_t* taken,
                                          std::uint32_t steps) {
  return workers + shm::load_relaxed(taken) >= steps;
}

}  // namespace mk::kernels::cuda
