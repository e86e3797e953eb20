/// \file
/// What the operators on GPUs are derived from: plan, kernel and arguments of one rank, and all of
/// creation and launch that does not depend on where the operator's tiles lie.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/comm/tile_grid.h"
#include "kernels/cuda/core/tile_limits.h"
#include "kernels/cuda/host/adaptive_blocks.h"
#include "kernels/cuda/host/gemm_matrices.h"
#include "kernels/cuda/host/operator_arguments.h"
#include "kernels/cuda/host/operator_frame.h"
#include "kernels/cuda/host/operator_inputs.h"
#include "kernels/cuda/host/planned.h"
#include "kernels/plan/legal.h"
#include "shm/host/result.h"

namespace mk::kernels::cuda {

/// `Plan`: of kernels/ops/<operator>/spec.h. `Arguments`: OperatorArguments or derived.
template <class PlanType, class Arguments>
class OperatorBase {
 public:
  OperatorBase(const OperatorBase&) = delete;
  OperatorBase& operator=(const OperatorBase&) = delete;

  /// The first failure among the launches that have ended: kTimeout, kAborted, kShapeMismatch,
  /// kLimitExceeded. Does not wait.
  Status status() const { return frame_.status(); }
  /// Waits for the stream, then answers what the last launch did, in which form and by which
  /// estimate, or the first failure.
  Result<LaunchStats> finish(cudaStream_t stream) {
    MK_ASSIGN_OR_RETURN(LaunchStats stats, frame_.finish(stream));
    stats.m = queued_.m;
    stats.mode = queued_.mode;
    stats.estimate = queued_.estimate;
    return stats;
  }
  const PlanType& plan() const { return plan_; }
  /// What the next launches show with them: Progress::tag.
  void set_tag(std::uint64_t tag) { arguments_.frame.host.told.tag = tag; }
  const RoleBlocks& blocks() const { return arguments_.launch.blocks; }
  /// Whether DMA engines bring this rank's rows to the node's others.
  bool shares_by_dma() const { return arguments_.frame.by_dma; }
  /// Groups that stream within the node and do nothing else.
  Warpgroups stream_groups() const {
    return blocks().reduce != 0 ? warpgroups_of(blocks().reduce)
                                : cuda::groups_that_only_share(arguments_.frame, blocks());
  }
  /// OperatorFrame::partition_steps
  std::vector<PartitionStep> partition_steps() const { return frame_.partition_steps(); }
  /// How far a launch has come that does not end: for users.
  std::string progress() const { return frame_.progress(arguments_.launch); }

 protected:
  /// `k`: this rank's own.
  OperatorBase(const char* op, const PlanType& plan, std::uint32_t k, kernels::BLayout b_layout)
      : plan_(plan), op_(op), k_(k), b_layout_(b_layout), frame_(op) {
    arguments_.launch.plan = plan;
  }
  ~OperatorBase() = default;

  /// Checks all that it is given, and asks the planner how launches run. `chunk_bytes`, `banks`,
  /// `local_banks`: the plan's.
  Status plan_with(plan::Op op, const RankContext& context, CudaOptions options,
                   std::uint32_t chunk_bytes, std::uint32_t banks, std::uint32_t local_banks) {
    if constexpr (requires { plan_.partials; }) options.result = {plan_.epilogue, plan_.partials};
    if (options.adaptive) options = without_groups(options);
    MK_RETURN_IF_ERROR(check_context(op_, plan_.nodes, plan_.locals, plan_.flag_count(),
                                     std::max(1u, options.send_groups.count()), context));
    MK_RETURN_IF_ERROR(check_shape(op_, plan_.tile_m, plan_.tile_n, plan_.max.n, k_));
    MK_RETURN_IF_ERROR(check_gated(op_, plan_.epilogue, plan_.max.n));
    MK_ASSIGN_OR_RETURN(const std::uint32_t device_blocks, frame_.choose_device(options));
    Tiling tiling{plan_.tile_m, plan_.tile_n, chunk_bytes, banks, local_banks};
    if constexpr (requires { plan_.two_shot; }) {
      if (plan_.nodes > 2)
        tiling.exchange = plan_.two_shot ? Exchange::kTwoShot : Exchange::kOneShot;
    }
    const Shape shape{plan_.max.m, plan_.max.n, k_};
    MK_ASSIGN_OR_RETURN(auto job, job_plan_of(options));
    MK_ASSIGN_OR_RETURN(
        planned_, plan_launches(op, context.world, shape, plan_.dtype, tiling,
                                plan::blocks_of_share(device_blocks, options.ranks_per_device),
                                context.lane_count, options, std::move(job)));
    return {};
  }

  /// Deals out the blocks as planned, and loads the kernel for the plan's tiles.
  Status start(const RankContext& context, const CudaOptions& options, const FlagMap& flags,
               const KernelChoice<Arguments>& kernels) {
    MK_RETURN_IF_ERROR(frame_.start(context, options, planned_needs(planned_), flags,
                                    arguments_.launch, arguments_.frame));
    const TileGrid columns(1, plan_.max.n, plan_.tile_m, plan_.tile_n,
                           plan_.epilogue.column_step());
    const auto choose = plan_.dtype == kernels::DType::kBf16 ? kernels.bf16 : kernels.f16;
    // Two pieces of sums make one of a gated C.
    const std::uint32_t least = plan_.epilogue.gated() ? 2 * kPieceColumns : 0;
    kernel_ = &choose(cuda_layout(b_layout_), std::max(least, columns.tile_cols()));
    return frame_.check(kernel_->prepare(), "the device refuses the kernel");
  }

  /// A of `a_rows` rows, of which a tile takes at most `tile_rows`, and B; not after a launch that
  /// failed. On the operator's device.
  Status set_product(const void* a, std::uint64_t lda, std::uint32_t a_rows,
                     std::uint32_t tile_rows, const void* b, std::uint64_t ldb) {
    MK_RETURN_IF_ERROR(status());
    const auto box_rows = static_cast<std::uint32_t>(round_up_to(tile_rows, 8));
    MK_ASSIGN_OR_RETURN(arguments_.product, make_product({op_, plan_.dtype, b_layout_, plan_.max.n,
                                                          k_, a, lda, a_rows, box_rows, b, ldb},
                                                         kernel_->b_box));
    return {};
  }
  /// What the next launch makes of the sums. The product's own epilogue finishes them where nobody
  /// adds to them; else it stores partial sums, and the operator's roles finish those.
  void set_epilogue(const void* bias) {
    const auto* const elements = static_cast<const std::uint16_t*>(bias);
    arguments_.launch.bias = elements;
    if constexpr (requires { plan_.partials; }) {
      if (world().size() > 1) {
        arguments_.epilogue = {};
        arguments_.epilogue.f32 = plan_.partials == Partials::kF32;
        return;
      }
    }
    arguments_.epilogue = {false, plan_.epilogue.activation, elements};
  }
  /// Settles the next launch's m, with its schedule, its form, and, of an adaptive partition, its
  /// blocks.
  void choose_form(cudaStream_t stream, std::uint32_t m, Mode mode) {
    estimate_ = planned_.expected(m);
    arguments_.launch.m = m;
    arguments_.launch.mode = mode == Mode::kAuto ? planned_.form(m, estimate_) : mode;
    frame_.choose_blocks(stream, m, arguments_.launch.mode, arguments_.launch.blocks,
                         arguments_.frame);
    arguments_.launch.make_schedule();
    LaunchTold& told = arguments_.frame.host.told;
    told.m = m;
    told.sizes[0] = plan_.max.n;
    told.sizes[1] = k_;
    told.chunks = arguments_.launch.chunks_sent();
    if constexpr (requires { arguments_.launch.schedule.tiles(); })
      told.tiles = arguments_.launch.schedule.tiles();
  }
  /// Puts the launch on the stream, with what is in the arguments besides these.
  Status enqueue(cudaStream_t stream, const GemmMatrices& of) {
    arguments_.c = of.c;
    arguments_.ldc = of.ldc;
    MK_RETURN_IF_ERROR(frame_.put_on(stream, *kernel_, arguments_));
    queued_ = {arguments_.launch.m, arguments_.launch.mode, estimate_};
    return {};
  }

  const World& world() const { return arguments_.launch.context.world; }
  std::byte* workspace(std::uint32_t local) const {
    return arguments_.launch.context.workspaces[local];
  }
  int device() const { return frame_.device(); }
  std::uint32_t k() const { return k_; }

  const PlanType plan_;
  Arguments arguments_;
  plan::OperatorPlan planned_;

 private:
  struct Form {
    std::uint32_t m = 0;
    Mode mode = Mode::kFused;
    Estimate estimate;
  };

  const char* const op_;
  const std::uint32_t k_;
  const kernels::BLayout b_layout_;
  OperatorFrame frame_;
  Estimate estimate_;  ///< of a launch that may yet be refused
  Form queued_;        ///< of the last one on a stream
  const OperatorKernel<Arguments>* kernel_ = nullptr;
};

}  // namespace mk::kernels::cuda
