/// \file
/// Attention on one GPU, forward: O = softmax(scale Q K^T) V. What operators over several GPUs are
/// measured against, and what shows that the core under them is as fast as others.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "kernels/cuda/core/attention_types.h"
#include "shm/host/result.h"

namespace mk::kernels::cuda {

/// What may be set by hand; 0 leaves the choice to the plan.
struct AttentionTuning {
  int blocks_max = 0;  ///< thread blocks to use, at most one per SM: leaves the other SMs to others
  int section = 0;     ///< heads (of all batches) that are worked on at one time
};

/// Checks sizes, strides and addresses, on the host alone. kInvalidArgument names what does not
/// fit and says what would.
Status check_attention(const AttentionProblem& problem);

/// Attention ready to launch any number of times on the device that was current at creation. It
/// keeps the addresses, not the memory. Launches are asynchronous and may be captured into a graph.
/// Launches of one plan must follow each other (one stream, or events between streams), as they
/// share the counter by which blocks take their items.
class AttentionPlan {
 public:
  /// As check_attention; kUnsupported: the device is no Hopper; kUnavailable: there is none.
  static Result<AttentionPlan> create(const AttentionProblem& problem,
                                      const AttentionTuning& tuning = {});

  /// kSystem with CUDA's reason if the launch was refused.
  Status launch(cudaStream_t stream) const;

  int blocks() const;
  int tile_queries() const;
  int tile_keys() const;

 private:
  struct Parts;
  AttentionPlan() = default;
  std::shared_ptr<const Parts> parts_;
};

}  // namespace mk::kernels::cuda
