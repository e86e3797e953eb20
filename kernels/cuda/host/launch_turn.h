/// \file
/// The turns of an operator's launches on a GPU, of operators that share a workspace: the kernel
/// that takes one (comm/turn_gate.h) goes ahead of a launch, unless the last one was this
/// operator's anyway.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/comm/launch.h"
#include "kernels/comm/rank_context.h"
#include "kernels/cuda/skeleton/launch_state.h"
#include "kernels/cuda/skeleton/turn_kernel.h"
#include "shm/host/result.h"

namespace mk::kernels::cuda {

class LaunchTurn {
 public:
  /// `launch`, `frame`: as they are at the operator's start. A context that is not shared takes
  /// none.
  cudaError_t start(const RankContext& context, const Launch& launch, const FrameArguments& frame);
  /// TurnGate::outlasts, from now on.
  void outlasts() { arguments_.gate.outlasts = true; }
  /// Before the launch is put on the stream.
  cudaError_t put_on(cudaStream_t stream);
  /// It has been.
  void note_put() const;
  /// Whether a local rank's later launch may fail and yet write where this one reads.
  bool heeds_peers() const {
    return share_.turn != nullptr && arguments_.gate.memory.world.locals > 1;
  }
  /// To a failure of a launch: for whom it waited, if it failed before its turn.
  void explain(const WaitRecord& record, Error& error) const;

 private:
  WorkspaceShare share_;
  TurnArguments arguments_;
};

}  // namespace mk::kernels::cuda
