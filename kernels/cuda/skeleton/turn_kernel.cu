#include "kernels/cuda/skeleton/executor_common.cuh"
#include "kernels/cuda/skeleton/turn_kernel.h"

namespace mk::kernels::cuda {
namespace {

constexpr std::uint32_t kLanes = 32;

/// A lane of the kernel's one warp.
struct TurnLane {
  std::uint64_t* launches;

  __device__ static std::uint32_t lane() { return threadIdx.x; }
  __device__ static std::uint32_t lanes() { return kLanes; }
  __device__ static bool all(bool yes) {
    const bool said = __all_sync(0xffffffffu, yes) != 0;
    __syncwarp();  // a vote orders no memory
    return said;
  }
  __device__ static std::uint64_t now_ns() { return ptx::now_ns(); }
  __device__ static std::uint32_t commit_time_ns() { return 0; }  // as RoleExecutor's
  __device__ static bool pause(std::uint32_t attempt) { return look_at_clock(attempt); }
  /// As a launch's poller does (poller.cuh).
  __device__ void waits(bool) const {
    if (threadIdx.x == 0 && launches != nullptr)
      shm::store_relaxed(launches, shm::load_relaxed(launches) + 1);
  }
};

__global__ void __launch_bounds__(kLanes)
    turn_kernel(const __grid_constant__ TurnArguments arguments) {
  TurnLane lane{arguments.launches};
  WaitTotals totals;
  take_turn(lane, arguments.gate, totals);
}

}  // namespace

cudaError_t prepare_turn() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, turn_kernel);
}

cudaError_t launch_turn(const TurnArguments& arguments, cudaStream_t stream) {
  turn_kernel<<<1, kLanes, 0, stream>>>(arguments);
  return cudaGetLastError();
}

}  // namespace mk::kernels::cuda
