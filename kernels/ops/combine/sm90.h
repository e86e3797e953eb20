/// \file
/// GEMM+Combine on Hopper GPUs: one launch is one persistent kernel per rank, which multiplies
/// the rows that MoE Dispatch+GEMM left, and sums them at their tokens' ranks. The host waits for
/// nothing.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>

#include "kernels/comm/launch_stats.h"
#include "kernels/comm/rank_context.h"
#include "kernels/cuda/host/cuda_options.h"
#include "kernels/cuda/host/expert_operator.h"
#include "kernels/ops/combine/device_input.h"
#include "kernels/ops/combine/sm90_arguments.h"
#include "kernels/ops/combine/spec.h"
#include "shm/host/result.h"

namespace mk::kernels {

/// What suits the GPU, for CombinePlan::make; the same on all ranks.
Tiling combine_cuda_tiling();

/// One rank's operator, on the device that was current at creation. Not thread-safe, except that
/// `status()` may be asked from any thread. Launches follow each other: one stream, or events
/// between streams; they may be captured into a graph, and a replay takes what is there then.
class CombineCuda
    : public cuda::ExpertOperator<CombinePlan, cuda::CombineArguments, CombineRefusals> {
 public:
  /// Everything `context` points to outlives the operator. kInvalidArgument, kLimitExceeded,
  /// kUnsupported (no Hopper, tiles that no kernel has, one bank over several nodes, or a kernel
  /// that this build leaves out), kUnavailable.
  static Result<std::unique_ptr<CombineCuda>> create(const CombinePlan& plan,
                                                     const RankContext& context,
                                                     const CudaOptions& options);

  /// Puts one launch on the stream, and does not wait. `out` is [count][H] at a multiple of 16
  /// bytes. All ranks launch equally often. A wrong argument (kInvalidArgument) changes nothing;
  /// after a launch that failed its error, at once.
  Status launch(cudaStream_t stream, const CombineDeviceInput& input, void* out,
                Mode mode = Mode::kFused);

  /// Waits for the stream, then answers what the last launch did, or the first failure. If any
  /// launch since the last `finish` stored nothing, the last one of these says why:
  /// CombinePlan::refusal. The operator, and the others, go on after that.
  Result<LaunchStats> finish(cudaStream_t stream);

 private:
  using ExpertOperator::ExpertOperator;
  Status start(const RankContext& context, const CudaOptions& options);
  Status choose_kernel();
  Status check_input(const CombineDeviceInput& input, const void* out) const;
  Status make_maps(const CombineDeviceInput& input);
  /// As many of the groups that sum make the index as may.
  void deal_groups();

  const cuda::CombineKernel* kernel_ = nullptr;
};

}  // namespace mk::kernels
