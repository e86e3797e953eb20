/// \file
/// MoE Dispatch+GEMM on Hopper GPUs: one launch is one persistent kernel per rank, which makes
/// the routing plan, gathers tokens, packs rows and multiplies them. The host waits for nothing.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>

#include "kernels/comm/launch_stats.h"
#include "kernels/comm/rank_context.h"
#include "kernels/cuda/host/cuda_options.h"
#include "kernels/cuda/host/expert_operator.h"
#include "kernels/cuda/host/row_engines.h"
#include "kernels/ops/moe/sm90_arguments.h"
#include "kernels/ops/moe/spec.h"
#include "shm/host/result.h"

namespace mk::kernels {

/// What suits the GPU, for MoeDispatchPlan::make; the same on all ranks.
Tiling moe_dispatch_cuda_tiling();

/// What a launch leaves in this rank's workspace, in device memory, until the next one begins.
struct MoeDispatchDeviceOutput {
  const std::uint32_t* offsets = nullptr;  ///< [experts here + 1]: their first rows; then their end
  const MoeRow* rows = nullptr;            ///< of each row of y
  const PlanSummary* summary = nullptr;
};

/// One rank's operator, on the device that was current at creation. Not thread-safe, except that
/// `status()` may be asked from any thread. Launches follow each other: one stream, or events
/// between streams. They may be captured into a graph, and a replay takes what routing and tokens
/// are there then.
class MoeDispatchCuda
    : public cuda::ExpertOperator<MoeDispatchPlan, cuda::MoeDispatchArguments, MoeRefusals> {
 public:
  /// Everything `context` points to outlives the operator. kInvalidArgument, kLimitExceeded,
  /// kUnsupported (no Hopper, tiles that no kernel has, or a kernel that this build leaves out),
  /// kUnavailable.
  static Result<std::unique_ptr<MoeDispatchCuda>> create(const MoeDispatchPlan& plan,
                                                         const RankContext& context,
                                                         const CudaOptions& options);

  /// Puts one launch on the stream, and does not wait. `y` has room for `capacity` rows of F
  /// elements, dense, at a multiple of 16 bytes. All ranks launch equally often. A wrong argument
  /// (kInvalidArgument) changes nothing; after a launch that failed its error, at once.
  Status launch(cudaStream_t stream, const MoeDispatchInput& input, void* y, std::uint32_t capacity,
                Mode mode = Mode::kFused);

  /// Waits for the stream, then answers what the last launch did, or the first failure. If any
  /// launch since the last `finish` computed nothing, the last one of these says why. With
  /// kInvalidArgument a rank's routing names an expert that does not exist, or a weight is no
  /// number (all ranks say so). With kLimitExceeded this rank's rows exceeded the capacity. The
  /// operator, and the others, go on after that.
  Result<LaunchStats> finish(cudaStream_t stream);

  MoeDispatchDeviceOutput output() const;
  /// Rows of y that the last launch that `finish` has seen gave; 0 if that computed nothing.
  std::uint32_t rows() const { return rows_; }
  /// Whether copy engines bring its tokens to the node's others.
  bool shares_by_dma() const { return engines_.used(); }

 private:
  MoeDispatchCuda(const char* op, const MoeDispatchPlan& plan)
      : ExpertOperator(op, plan), engines_(op) {}
  Status start(const RankContext& context, const CudaOptions& options);
  Status check_input(const MoeDispatchInput& input, const void* y, std::uint32_t capacity) const;
  Status make_maps(const MoeDispatchInput& input, void* y, std::uint32_t capacity);
  /// All groups that share pull, too, and some plan.
  void deal_groups();
  Status create_engines(const CudaOptions& options);
  Status bring_tokens(cuda::DmaQueue& queue) const;

  const cuda::MoeDispatchKernel* kernel_ = nullptr;
  cuda::RowEngines engines_;
  std::uint64_t dma_bytes_ = 0;  ///< that they bring at a time; 0: moe_dispatch_dma_bytes
  std::uint32_t rows_ = 0;
};

}  // namespace mk::kernels
