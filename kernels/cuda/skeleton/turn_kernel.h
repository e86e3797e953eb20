/// \file
/// The kernel that takes an operator's turn in a workspace which it shares with unlike ones.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/comm/turn_gate.h"

namespace mk::kernels::cuda {

struct TurnArguments {
  TurnGate gate;
  std::uint64_t* launches = nullptr;  ///< HostWords::launches; odd while the kernel waits, too
};

/// Loads the kernel, which CUDA would else do at its first launch.
cudaError_t prepare_turn();
cudaError_t launch_turn(const TurnArguments& arguments, cudaStream_t stream);

}  // namespace mk::kernels::cuda
