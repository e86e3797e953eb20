/// \file
/// A collective's kernel, seen from the host, and what a launch hands to it. Plain data for host
/// and device.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/skeleton/launch_state.h"

namespace mk::kernels::cuda {

/// `CollectiveLaunch`: of the operator's protocol.h. All blocks are FrameArguments::comm_blocks;
/// the launch's numbers of blocks count warpgroups, of each role.
template <class CollectiveLaunch>
struct CollectiveArguments {
  CollectiveLaunch launch;  ///< the kernel puts in the epoch
  FrameArguments frame;
};

template <class CollectiveLaunch>
struct CollectiveKernel {
  using Arguments = CollectiveArguments<CollectiveLaunch>;
  cudaError_t (*prepare)();  ///< on the current device, before any launch
  cudaError_t (*launch)(const Arguments&, cudaStream_t);
};

}  // namespace mk::kernels::cuda
