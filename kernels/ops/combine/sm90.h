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
#include "kernels/cuda/host/operator_frame.h"
#include "kernels/ops/combine/device_input.h"
#include "kernels/ops/combine/sm90_arguments.h"
#include "kernels/ops/combine/spec.h"
#include "kernels/plan/accounted.h"
#include "shm/host/result.h"

namespace mk::kernels {

/// What suits the GPU, for CombinePlan::make; the same on all ranks.
Tiling combine_cuda_tiling();

/// One rank's operator, on the device that was current at creation. Not thread-safe, except that
/// `status()` may be asked from any thread. Launches follow each other: one stream, or events
/// between streams; they may be captured into a graph, and a replay takes what is there then.
class CombineCuda {
 public:
  /// Everything `context` points to outlives the operator. kInvalidArgument, kLimitExceeded,
  /// kUnsupported (no Hopper, tiles that no kernel has, one bank over several nodes, or a kernel
  /// that this build leaves out), kUnavailable.
  static Result<std::unique_ptr<CombineCuda>> create(const CombinePlan& plan,
                                                     const RankContext& context,
                                                     const CudaOptions& options);
  ~CombineCuda();
  CombineCuda(const CombineCuda&) = delete;
  CombineCuda& operator=(const CombineCuda&) = delete;

  /// Puts one launch on the stream, and does not wait. `out` is [count][H] at a multiple of 16
  /// bytes. All ranks launch equally often. A wrong argument (kInvalidArgument) changes nothing;
  /// after a launch that failed its error, at once.
  Status launch(cudaStream_t stream, const CombineDeviceInput& input, void* out,
                Mode mode = Mode::kFused);

  /// The first failure that has broken the operator: kTimeout, kAborted, kLimitExceeded (launches).
  /// Does not wait.
  Status status() const { return frame_.status(); }
  /// What the next launches show with them: Progress::tag.
  void set_tag(std::uint64_t tag) { arguments_.frame.host.told.tag = tag; }
  /// Waits for the stream, then answers what the last launch did, or the first failure. If any
  /// launch since the last `finish` stored nothing, the last one of these says why:
  /// CombinePlan::refusal. The operator, and the others, go on after that.
  Result<LaunchStats> finish(cudaStream_t stream);

  /// This rank's.
  ShardRange experts() const { return experts_of(plan_.shape.experts, world()); }
  const CombinePlan& plan() const { return plan_; }
  const RoleBlocks& blocks() const { return arguments_.launch.blocks; }
  /// How far a launch has come that does not end: for users.
  std::string progress() const { return frame_.progress(arguments_.launch); }

 private:
  explicit CombineCuda(const CombinePlan& plan);
  Status start(const RankContext& context, const CudaOptions& options);
  Status choose_kernel();
  Status map_slots();
  Status check_input(const CombineDeviceInput& input, const void* out) const;
  Status make_maps(const CombineDeviceInput& input);
  const World& world() const { return arguments_.launch.context.world; }

  struct Form {
    std::uint32_t m = 0;
    Mode mode = Mode::kFused;
    Estimate estimate;
  };

  const CombinePlan plan_;
  cuda::CombineArguments arguments_;
  cuda::OperatorFrame frame_;
  plan::Account account_;  ///< what its launches are predicted by
  BLayout b_layout_ = BLayout::kNK;
  Form queued_;  ///< of the last launch on a stream
  const cuda::CombineKernel* kernel_ = nullptr;
  CombineRefusals* refusals_ = nullptr;  ///< in memory of the host that the GPU can write
  std::uint32_t refused_ = 0;            ///< of them, told by `finish`
};

}  // namespace mk::kernels
