/// \file
/// What the executors on a GPU have in common: how often a wait looks at the clock, and how those
/// that do something together are counted.
#pragma once

#include <cstdint>

#include "kernels/cuda/launch_state.h"
#include "kernels/cuda/ptx.cuh"

namespace mk::kernels::cuda {

/// After how many looks at a flag a wait looks at the clock, too (see comm/wait.h). A look takes
/// most of a microsecond, so there is no need to sleep.
__device__ __forceinline__ bool look_at_clock(std::uint32_t attempt) {
  constexpr std::uint32_t kLooksPerClock = 32;
  return attempt % kLooksPerClock == kLooksPerClock - 1;
}

/// One more of `count` is done: whether it is the last one. What all stored before is visible to
/// who acquires the last one's next release. `done` is zero again then, for the next launch.
__device__ __forceinline__ bool last_of(std::uint32_t* done, std::uint32_t count) {
  if (ptx::fetch_add_gpu(done, 1) + 1 != count) return false;
  shm::store_relaxed(done, 0u);
  return true;
}

/// The same of the parts of a chunk, each by a block of this GPU that has seen its own stores done.
__device__ __forceinline__ bool count_part(DeviceState& state, Role role, std::uint32_t chunk,
                                           std::uint32_t parts) {
  return last_of(&state.parts_done[role == Role::kReceive ? 1 : 0][place_of_parts(chunk)], parts);
}

}  // namespace mk::kernels::cuda
