/// \file
/// What the executors on a GPU have in common: how often a wait looks at the clock, and how those
/// that do something together are counted.
#pragma once

#include <cstdint>

#include "kernels/cuda/core/ptx.cuh"
#include "kernels/cuda/skeleton/launch_state.h"

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

/// What all executors on a GPU are that run whole roles.
class RoleExecutor {
 public:
  __device__ explicit RoleExecutor(DeviceState& state) : state_(state) {}

  static __device__ void publish_within_rank(std::uint32_t* flag, std::uint32_t epoch) {
    ptx::store_release_gpu(flag, epoch);
  }
  static __device__ std::uint64_t now_ns() { return ptx::now_ns(); }
  /// The GPU's clock is not the daemon's: no time.
  static __device__ std::uint32_t commit_time_ns() { return 0; }
  static __device__ bool pause(std::uint32_t attempt) { return look_at_clock(attempt); }

  /// Compute blocks show their tiles one by one, and each that it has none left, to people.
  static __device__ bool counts_done(Role role) { return role != Role::kCompute; }
  __device__ bool last_done(Role role, std::uint32_t count) {
    return last_of(&state_.roles_done[static_cast<std::uint32_t>(role)], count);
  }
  __device__ bool last_part(Role role, std::uint32_t chunk, std::uint32_t parts) {
    return count_part(state_, role, chunk, parts);
  }
  /// Of a gather's role: see gather::next_step.
  __device__ std::uint32_t take_step(Role role) {
    return atomicAdd(role == Role::kReceive ? &state_.receives_taken : &state_.streams_taken, 1u);
  }

 protected:
  __device__ DeviceState& state() { return state_; }

 private:
  DeviceState& state_;
};

}  // namespace mk::kernels::cuda
