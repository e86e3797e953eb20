/// \file
/// MoE Dispatch+GEMM on the CPU: every rank's tokens go to the ranks that have their experts.
/// Each rank multiplies what reaches it with its experts' weights. Blocks are threads; what they do
/// is kernels/ops/moe/roles.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "kernels/comm/launch_stats.h"
#include "kernels/comm/rank_context.h"
#include "kernels/comm/types.h"
#include "kernels/cpu/launch_runner.h"
#include "kernels/ops/moe/launch.h"
#include "kernels/ops/moe/routing_plan.h"
#include "kernels/ops/moe/spec.h"
#include "shm/host/result.h"

namespace mk::kernels {

struct MoeDispatchCpuOptions : CpuOptions {
  /// Of an expert's weights: [H][F], or [F][H]; with a gated epilogue 2 F in the place of F.
  BLayout b_layout = BLayout::kKN;
};

/// One rank's operator; made like GemmArCpu, and as little thread-safe.
class MoeDispatchCpu {
 public:
  /// Starts the blocks (threads that sleep between launches). Everything `context` points to
  /// outlives the operator. Errors: kInvalidArgument for a context that does not fit the plan,
  /// kUnsupported when oneDNN has no kernel for this machine, kSystem when threads cannot be
  /// started.
  static Result<std::unique_ptr<MoeDispatchCpu>> create(const MoeDispatchPlan& plan,
                                                        const RankContext& context,
                                                        const MoeDispatchCpuOptions& options);
  ~MoeDispatchCpu();
  MoeDispatchCpu(const MoeDispatchCpu&) = delete;
  MoeDispatchCpu& operator=(const MoeDispatchCpu&) = delete;

  /// Runs one launch; returns when this rank's rows of `y` are complete, no local rank needs this
  /// one's tokens any more and no block touches memory of the caller. All ranks launch equally
  /// often; counts may differ. `y` has room for `capacity` rows of F elements, dense, of which the
  /// first rows().size() are written.
  ///
  /// A wrong argument (kInvalidArgument) changes nothing. kLimitExceeded when the routing sends
  /// this rank more than `capacity` rows. Then it stores nothing in `y`, but has done its part for
  /// the other ranks, and all can launch again. Any other error breaks the operator for good.
  Result<LaunchStats> launch(const MoeDispatchInput& input, void* y, std::uint32_t capacity,
                             Mode mode = Mode::kFused);

  /// This rank's.
  ShardRange experts() const;
  /// Of the last launch, in the workspace: expert experts().first + i has the rows
  /// [expert_offsets()[i], expert_offsets()[i + 1]) of y.
  std::span<const std::uint32_t> expert_offsets() const;
  /// Of the last launch, in the workspace: one for each row of y; none after an error.
  std::span<const MoeRow> rows() const;

  const MoeDispatchPlan& plan() const;
  /// Launches so far: the epoch of the last one.
  std::uint32_t epoch() const;
  /// For traces.
  LaunchRunner& runner();

 private:
  class Impl;
  explicit MoeDispatchCpu(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace mk::kernels
