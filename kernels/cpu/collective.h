/// \file
/// Operators that compute nothing but what communication needs (AllGather, ReduceScatter), on the
/// CPU. All have one interface; what one does is its `Op`.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/comm/launch_stats.h"
#include "kernels/comm/plan_tools.h"
#include "kernels/comm/rank_context.h"
#include "kernels/cpu/launch_runner.h"
#include "kernels/plan/account.h"
#include "shm/host/result.h"

namespace mk::kernels {

/// One rank's operator. Each operator's spec.h makes it of a plan.
///
/// Not thread-safe: one launch at a time, and one launch at a time over all operators that share
/// the context's lanes.
class CollectiveCpu {
 public:
  virtual ~CollectiveCpu() = default;

  /// Runs one launch; returns when this rank has its output, has done its part for the others', and
  /// no block touches memory of the caller any more. All ranks launch equally often and with the
  /// same `m`, 1 to the plan's. `input` and `output` lie without gaps, and apart; spec.h says what
  /// they are. An output is undefined after an error. `mode` kUnfused: the steps of a launch follow
  /// each other; kAuto: as the estimate says.
  ///
  /// A wrong argument (kInvalidArgument) changes nothing. Any other error breaks the operator for
  /// good: later launches answer the same error at once. kTimeout: a wait's deadline passed;
  /// kAborted: an abort word was set, or a local rank's launch failed; kShapeMismatch: ranks
  /// launched with different `m`.
  virtual Result<LaunchStats> launch(const void* input, void* output, std::uint32_t m,
                                     Mode mode) = 0;
  /// Where the input may lie so that the network reads it there; null: there is no such place.
  virtual void* input() const = 0;
  /// For traces.
  virtual LaunchRunner& runner() = 0;
};

/// `Op` has
///
///     static constexpr const char* kName;               // in messages: "all_gather"
///     using Plan, Launch;
///     class Executor;                                    // Executor(const Launch&): of one block
///     static std::vector<RoleThread> threads(const RoleBlocks&, const World&);
///     static bool run_role(Executor&, const Launch&, Role, std::uint32_t index, BlockTotals&);
///
/// and a Plan what every plan has, and `m_max`, sizes(), banks(), input(context), geometry() and
/// bind(...).
template <class Op>
class CollectiveRunner final : public CollectiveCpu, private RoleBody {
 public:
  using Plan = typename Op::Plan;

  /// Checks the arguments and starts the blocks' threads.
  static Result<std::unique_ptr<CollectiveCpu>> create(const Plan& plan, const RankContext& context,
                                                       const CpuOptions& options) {
    MK_RETURN_IF_ERROR(check_options(Op::kName, options));
    MK_RETURN_IF_ERROR(check_context(Op::kName, plan.nodes, plan.locals, plan.flag_count(),
                                     options.blocks.send, context));
    auto runner = std::make_unique<CollectiveRunner>(plan, context, options);
    MK_RETURN_IF_ERROR(runner->runner_.start(Op::threads(options.blocks, context.world)));
    return std::unique_ptr<CollectiveCpu>(std::move(runner));
  }

  CollectiveRunner(const Plan& plan, const RankContext& context, const CpuOptions& options)
      : plan_(plan),
        rates_(rank_rates(options, context.world, 0.0)),
        launch_(make_launch<typename Op::Launch>(plan.geometry(), context, options.blocks,
                                                 plan.banks())),
        runner_(Op::kName, launch_, *this, options) {
    if constexpr (requires { launch_.in_node_order; })
      launch_.in_node_order = options.batch_invariant;
  }

  Result<LaunchStats> launch(const void* input, void* output, std::uint32_t m, Mode mode) override {
    if (m < 1 || m > plan_.m_max) {
      return fail(ErrorCode::kInvalidArgument,
                  "{}: m = {} is not in 1 to {}, which the operator was made for", Op::kName, m,
                  plan_.m_max);
    }
    MK_RETURN_IF_ERROR(runner_.ready());
    MK_RETURN_IF_ERROR(plan_.bind(input, output, m, launch_));
    return runner_.run(m, mode, plan::expected(plan_.work(launch_.context.world, m), rates_));
  }
  void* input() const override { return plan_.input(launch_.context); }
  LaunchRunner& runner() override { return runner_; }

 private:
  void begin_launch() override { launch_.make_schedule(); }
  LaunchTasks tasks() const override { return {0, launch_.chunks_sent(), plan_.sizes()}; }
  bool run_role(Role role, std::uint32_t index, BlockTotals& totals) override {
    typename Op::Executor executor(launch_);
    return Op::run_role(executor, launch_, role, index, totals);
  }

  const Plan plan_;
  const MachineRates rates_;
  typename Op::Launch launch_;
  LaunchRunner runner_;  ///< ends first: its threads use the rest
};

}  // namespace mk::kernels
