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
#include "kernels/cuda/host/operator_frame.h"
#include "kernels/ops/moe/sm90_arguments.h"
#include "kernels/ops/moe/spec.h"
#include "kernels/plan/accounted.h"
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
class MoeDispatchCuda {
 public:
  /// Everything `context` points to outlives the operator. kInvalidArgument, kLimitExceeded,
  /// kUnsupported (no Hopper, tiles that no kernel has, or a kernel that this build leaves out),
  /// kUnavailable.
  static Result<std::unique_ptr<MoeDispatchCuda>> create(const MoeDispatchPlan& plan,
                                                         const RankContext& context,
                                                         const CudaOptions& options);
  ~MoeDispatchCuda();
  MoeDispatchCuda(const MoeDispatchCuda&) = delete;
  MoeDispatchCuda& operator=(const MoeDispatchCuda&) = delete;

  /// Puts one launch on the stream, and does not wait. `y` has room for `capacity` rows of F
  /// elements, dense, at a multiple of 16 bytes. All ranks launch equally often. A wrong argument
  /// (kInvalidArgument) changes nothing; after a launch that failed its error, at once.
  Status launch(cudaStream_t stream, const MoeDispatchInput& input, void* y, std::uint32_t capacity,
                Mode mode = Mode::kFused);

  /// The first failure that has broken the operator: kTimeout, kAborted, kLimitExceeded (launches).
  /// Does not wait.
  Status status() const { return frame_.status(); }
  /// What the next launches show with them: Progress::tag.
  void set_tag(std::uint64_t tag) { arguments_.frame.host.told.tag = tag; }
  /// Waits for the stream, then answers what the last launch did, or the first failure. If any
  /// launch since the last `finish` computed nothing, the last one of these says why. With
  /// kInvalidArgument a rank's routing names an expert that does not exist, or a weight is no
  /// number (all ranks say so). With kLimitExceeded this rank's rows exceeded the capacity. The
  /// operator, and the others, go on after that.
  Result<LaunchStats> finish(cudaStream_t stream);

  ShardRange experts() const { return experts_of(plan_.shape.experts, world()); }
  MoeDispatchDeviceOutput output() const;
  /// Rows of y that the last launch that `finish` has seen gave; 0 if that computed nothing.
  std::uint32_t rows() const { return rows_; }
  const MoeDispatchPlan& plan() const { return plan_; }
  const RoleBlocks& blocks() const { return arguments_.launch.blocks; }
  /// How far a launch has come that does not end: for users.
  std::string progress() const { return frame_.progress(arguments_.launch); }

 private:
  explicit MoeDispatchCuda(const MoeDispatchPlan& plan);
  Status start(const RankContext& context, const CudaOptions& options);
  Status check_input(const MoeDispatchInput& input, const void* y, std::uint32_t capacity) const;
  Status make_maps(const MoeDispatchInput& input, void* y, std::uint32_t capacity);
  const World& world() const { return arguments_.launch.context.world; }

  struct Form {
    std::uint32_t m = 0;
    Mode mode = Mode::kFused;
    Estimate estimate;
  };

  const MoeDispatchPlan plan_;
  cuda::MoeDispatchArguments arguments_;
  cuda::OperatorFrame frame_;
  plan::Account account_;  ///< what its launches are predicted by
  BLayout b_layout_ = BLayout::kNK;
  Form queued_;  ///< of the last launch on a stream
  const cuda::MoeDispatchKernel* kernel_ = nullptr;
  MoeRefusals* refusals_ = nullptr;  ///< in memory of the host that the GPU can write
  std::uint32_t refused_ = 0;        ///< of them, told by `finish`
  std::uint32_t rows_ = 0;
};

}  // namespace mk::kernels
