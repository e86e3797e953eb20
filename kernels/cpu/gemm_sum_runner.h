/// \file
/// The frame of an operator that sums products over ranks, on the CPU: who owns what, and the steps
/// of a launch. What GEMM+AllReduce and GEMM+ReduceScatter do differently is their `Op`.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "kernels/comm/plan_tools.h"
#include "kernels/cpu/gemm_sum.h"
#include "kernels/plan/account.h"

namespace mk::kernels {

/// One rank's operator. `Op` has
///
///     static constexpr const char* kName;                // in messages: "gemm_ar"
///     using Plan = ..., Launch = ..., Executor = ...;    // Executor: of GemmSumExecutor
///     static constexpr std::optional<Role> kAfterCompute;
///     static CpuGemm::TileShape largest_tile(const Plan&);           // of any launch
///     static auto grids(const Plan&, std::uint32_t m);               // an array of TileGrid
///     static Status check(const World&, const GemmMatrices&, std::uint32_t m);
///     static bool run_role(Executor&, const Launch&, Role, std::uint32_t index, BlockTotals&);
///     static std::uint32_t sums(const Launch&);                      // tasks of the reduce role
///     static bool sum_ready(const Launch&, std::uint32_t task);      // a look, which never waits
template <class Op>
class GemmSumRunner : private RoleBody {
 public:
  using Plan = typename Op::Plan;

  /// Checks the arguments and starts the blocks' threads. `Runner`: this class or one made of it.
  template <class Runner>
  static Result<std::unique_ptr<Runner>> create(const Plan& plan, std::uint32_t k,
                                                const RankContext& context,
                                                const GemmCpuOptions& options) {
    if (k < 1 || k > kSideMax)
      return fail(ErrorCode::kInvalidArgument, "{}: k = {} is not in 1 to {}", Op::kName, k,
                  kSideMax);
    MK_RETURN_IF_ERROR(check_options(Op::kName, options));
    MK_RETURN_IF_ERROR(check_context(Op::kName, plan.nodes, plan.locals, plan.flag_count(),
                                     options.blocks.send, context));
    auto runner = std::make_unique<Runner>(plan, k, context, options);
    MK_RETURN_IF_ERROR(runner->start());
    return runner;
  }

  GemmSumRunner(const Plan& plan, std::uint32_t k, const RankContext& context,
                const GemmCpuOptions& options)
      : plan_(plan),
        k_(k),
        options_(options),
        math_(row_math(plan.dtype)),
        launch_(make_launch<typename Op::Launch>(plan, context, options.blocks, plan.banks)),
        runner_(Op::kName, launch_, *this, options) {}
  virtual ~GemmSumRunner() = default;

  Result<LaunchStats> launch(const void* a, std::uint64_t lda, const void* b, std::uint64_t ldb,
                             void* c, std::uint64_t ldc, std::uint32_t m, Mode mode,
                             const void* bias) {
    const GemmMatrices matrices{
        static_cast<const std::uint16_t*>(a), lda, static_cast<const std::uint16_t*>(b),   ldb,
        static_cast<std::uint16_t*>(c),       ldc, static_cast<const std::uint16_t*>(bias)};
    MK_RETURN_IF_ERROR(check_gemm_launch(Op::kName, matrices, m, plan_, k_, options_.b_layout));
    MK_RETURN_IF_ERROR(Op::check(world(), matrices, m));
    MK_RETURN_IF_ERROR(runner_.ready());
    matrices_ = matrices;
    launch_.bias = matrices.bias;
    const auto grids = Op::grids(plan_, m);
    const Status prepared = tiles_->prepare(grids, {&matrices_.lda, 1}, matrices_.ldb);
    if (!prepared) return runner_.broken_by(prepared.error());
    nonfinite_.store(0, std::memory_order_relaxed);
    MK_ASSIGN_OR_RETURN(LaunchStats stats,
                        runner_.run(m, mode, plan::expected(plan_.work(world(), m, k_), rates_)));
    stats.nonfinite_partials = nonfinite_.load(std::memory_order_relaxed);
    return stats;
  }

  const Plan& plan() const { return plan_; }
  std::uint32_t epoch() const { return launch_.epoch; }
  LaunchRunner& runner() { return runner_; }
  /// This rank's own.
  const std::byte* workspace() const { return launch_.context.workspaces[world().local]; }

 private:
  const World& world() const { return launch_.context.world; }

  Status start() {
    MK_ASSIGN_OR_RETURN(
        tiles_, TileGemm::create(product_threads(), Op::largest_tile(plan_), plan_.max.n, k_,
                                 plan_.dtype, options_.b_layout, options_.batch_invariant));
    rates_ = rank_rates(options_, world(), tiles_->path());
    if constexpr (requires { launch_.in_node_order; })
      launch_.in_node_order = options_.batch_invariant;
    if (adaptive_) runner_.show_partition(adaptive_->board());
    return runner_.start(gemm_sum_threads(launch_.blocks, world(), Op::kAfterCompute));
  }

  /// Those that may multiply.
  std::uint32_t product_threads() {
    const std::uint32_t compute = launch_.blocks.compute.count();
    if (!options_.adaptive || world().locals == 1) return compute;
    adaptive_.emplace(Role::kReduce, compute, launch_.blocks.reduce.count());
    return adaptive_->workers();
  }

  void begin_launch() override {
    launch_.make_schedule();
    if (!adaptive_) return;
    const bool on = launch_.mode == Mode::kFused;
    dealt_ = dealt_by_task(launch_, launch_.schedule.tiles());
    dealt_.blocks.reduce = std::max(1u, Op::sums(launch_));
    adaptive_->begin(on ? launch_.schedule.tiles() : 0, on ? Op::sums(launch_) : 0);
  }
  LaunchTasks tasks() const override {
    return {launch_.schedule.tiles(), launch_.chunks_sent(), {plan_.max.n, k_}};
  }
  bool run_role(Role role, std::uint32_t index, BlockTotals& totals) override {
    const bool adapts = adaptive_ && adaptive_->has(role);
    const std::uint32_t worker = adapts                   ? adaptive_->worker(role, index)
                                 : role == Role::kCompute ? index
                                                          : 0;
    typename Op::Executor executor(*tiles_, math_, plan_, matrices_, worker,
                                   options_.count_nonfinite ? &nonfinite_ : nullptr,
                                   adapts ? &*adaptive_ : nullptr);
    if (!adapts) return Op::run_role(executor, launch_, role, index, totals);
    Tasks tasks{*this, executor, totals};
    if (!adaptive_->run(worker, tasks)) return false;
    // Behind all tasks: what the role sees to, also where it has none.
    return role == Role::kCompute ||
           Op::run_role(executor, dealt_, role, dealt_.blocks.reduce.count(), totals);
  }
  /// For take_task (partition_board.h). Tiles wait for no sum.
  struct Tasks {
    GemmSumRunner& runner;
    typename Op::Executor& executor;
    BlockTotals& totals;

    bool ready(Work work, std::uint32_t task) const {
      return work == Work::kCompute || Op::sum_ready(runner.dealt_, task);
    }
    bool run(Work work, std::uint32_t task) {
      return Op::run_role(executor, runner.dealt_, runner.adaptive_->role_of(work), task, totals);
    }
    static std::uint64_t now_ns() { return CpuPacer::now_ns(); }
  };
  Status role_error() const override { return tiles_->error(); }

  const Plan plan_;
  const std::uint32_t k_;
  const GemmCpuOptions options_;
  MachineRates rates_;
  const RowMath& math_;
  GemmMatrices matrices_;
  std::atomic<std::uint64_t> nonfinite_{0};  ///< of the launch; its threads add to it
  std::unique_ptr<TileGemm> tiles_;
  typename Op::Launch launch_;
  typename Op::Launch dealt_;              ///< of an adaptive launch's tasks
  std::optional<AdaptiveRoles> adaptive_;  ///< if this rank has both kinds of work
  LaunchRunner runner_;                    ///< ends first: its threads use the rest
};

}  // namespace mk::kernels
