/// \file
/// The host side of a collective on a GPU: checks and launches. An operator adds its kernel and
/// what its roles need.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>

#include "kernels/comm/plan_tools.h"
#include "kernels/cuda/host/collective.h"
#include "kernels/cuda/host/collective_arguments.h"
#include "kernels/cuda/host/operator_frame.h"
#include "kernels/plan/collective.h"
#include "kernels/plan/job_plan.h"
#include "kernels/plan/operator_plan.h"

namespace mk::kernels::cuda {

/// `Op` has
///
///     static constexpr const char* kName;       // in messages: "all_gather"
///     using Plan, Launch;
///     static constexpr Role kStreams;           // kShare or kReduce
///     static constexpr Role kCaller;            // kCompute or kCollect
///     static Status check_rows(const Plan&);    // whether a GPU takes rows of that length
///     static bool streams(const World&);        // whether there is such a role
///     static bool receives(const World&);
///     static FlagMap flags(const Plan&);
///     static const CollectiveKernel<Launch>& kernel(const Plan&);
///     static void settle(Launch&);              // after make_schedule, before a launch
template <class Op>
class CollectiveCudaOperator final : public CollectiveCuda {
 public:
  using Plan = typename Op::Plan;

  static Result<std::unique_ptr<CollectiveCuda>> create(const Plan& plan,
                                                        const RankContext& context,
                                                        const CudaOptions& options) {
    auto made = std::make_unique<CollectiveCudaOperator>(plan);
    MK_RETURN_IF_ERROR(made->start(context, options));
    return std::unique_ptr<CollectiveCuda>(std::move(made));
  }
  explicit CollectiveCudaOperator(const Plan& plan)
      : plan_(plan), kernel_(Op::kernel(plan)), frame_(Op::kName) {
    arguments_.launch.plan = plan.geometry();
  }

  Status launch(CUstream_st* stream, const void* input, void* output, std::uint32_t m,
                Mode mode) override {
    MK_RETURN_IF_ERROR(status());
    if (m < 1 || m > plan_.m_max) {
      return fail(ErrorCode::kInvalidArgument,
                  "{}: m = {} is not in 1 to {}, which the operator was made for", Op::kName, m,
                  plan_.m_max);
    }
    MK_RETURN_IF_ERROR(check_address("input", input));
    MK_RETURN_IF_ERROR(check_address("output", output));
    auto& launch = arguments_.launch;
    MK_RETURN_IF_ERROR(plan_.bind(input, output, m, launch));
    launch.m = m;
    launch.mode = mode == Mode::kAuto ? Mode::kFused : mode;
    launch.make_schedule();
    Op::settle(launch);
    arguments_.frame.host.told.m = m;
    arguments_.frame.host.told.chunks = launch.chunks_sent();
    const OnDevice on_device(frame_.device());
    MK_RETURN_IF_ERROR(frame_.put_on(stream, kernel_, arguments_));
    queued_m_ = m;
    queued_estimate_ = expected(m);
    queued_mode_ = launch.mode;
    return {};
  }
  Status status() const override { return frame_.status(); }
  Result<LaunchStats> finish(CUstream_st* stream) override {
    MK_ASSIGN_OR_RETURN(LaunchStats stats, frame_.finish(stream));
    stats.m = queued_m_;
    stats.mode = queued_mode_;
    stats.estimate = queued_estimate_;
    return stats;
  }
  void set_tag(std::uint64_t tag) override { arguments_.frame.host.told.tag = tag; }
  void* input() const override { return plan_.input(arguments_.launch.context); }

 private:
  Status start(const RankContext& context, const CudaOptions& options) {
    const World& world = context.world;
    MK_RETURN_IF_ERROR(check_context(Op::kName, plan_.nodes, plan_.locals, plan_.flag_count(),
                                     std::max(1u, options.send_groups.count()), context));
    MK_RETURN_IF_ERROR(Op::check_rows(plan_));
    GroupNeeds needs;
    needs.multiplies = false;
    needs.streams = Op::kStreams;
    needs.stream = Op::streams(world);
    needs.send = world.nodes > 1;
    needs.receive = Op::receives(world);
    auto& launch = arguments_.launch;
    LaunchTold& told = arguments_.frame.host.told;
    MK_ASSIGN_OR_RETURN(const std::shared_ptr<const plan::JobPlan> job, job_plan_of(options));
    machine_ = plan::with_rates(job->machine, options.rates);
    MK_RETURN_IF_ERROR(
        frame_.start(context, options, needs, Op::flags(plan_), launch, arguments_.frame));
    told.works = Op::kCaller;
    std::ranges::copy(plan_.sizes(), told.sizes);
    if constexpr (requires { launch.in_node_order; })
      launch.in_node_order = options.batch_invariant;
    return frame_.check(kernel_.prepare(), "the device refuses the kernel");
  }
  Estimate expected(std::uint32_t m) const {
    plan::Collective collective;
    collective.sums = Op::kStreams == Role::kReduce;
    collective.nodes = plan_.nodes;
    collective.locals = plan_.locals;
    collective.bytes = double{1} * m * plan_.n * bytes_of(plan_.dtype);
    collective.warpgroups = arguments_.launch.blocks.share;
    return plan::estimate_of(plan::predict(collective, machine_, Mode::kFused),
                             plan::predict(collective, machine_, Mode::kUnfused));
  }
  static Status check_address(const char* name, const void* memory) {
    if (reinterpret_cast<std::uintptr_t>(memory) % 16 == 0) return {};
    return fail(ErrorCode::kInvalidArgument,
                "{}: the {} begins at {}; on a GPU at a multiple of 16 bytes", Op::kName, name,
                memory);
  }

  const Plan plan_;
  const CollectiveKernel<typename Op::Launch>& kernel_;
  CollectiveArguments<typename Op::Launch> arguments_;
  OperatorFrame frame_;
  plan::Machine machine_;
  std::uint32_t queued_m_ = 0;  ///< of the last launch on a stream
  Mode queued_mode_ = Mode::kFused;
  Estimate queued_estimate_;
};

}  // namespace mk::kernels::cuda
