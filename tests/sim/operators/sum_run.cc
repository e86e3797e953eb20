// GEMM+AllReduce and GEMM+ReduceScatter.
#include <utility>

#include "kernels/ops/gemm_ar/run_role.h"
#include "kernels/ops/gemm_ar/spec.h"
#include "kernels/ops/gemm_rs/run_role.h"
#include "kernels/ops/gemm_rs/spec.h"
#include "tests/sim/operators/operator_run.h"

namespace mk::sim {
namespace {

using namespace kernels;  // NOLINT(google-build-using-namespace): the operators' vocabulary

/// Both operators' executor.
class SumExecutor : public VirtualExecutor {
 public:
  SumExecutor(VirtualThreads& threads, RankState& rank, const Costs& costs, Role role,
              const SumGeometry& plan, std::uint32_t m)
      : VirtualExecutor(threads, rank, costs, role),
        plan_(plan),
        elements_(double{1} * m * plan.max.n) {}

  bool multiply(const TileRect& rect, void* /*target*/, std::uint64_t /*stride*/) {
    const double elements = double{1} * rect.rows * rect.columns;
    // One of the node's ranks owns the tile, and stores it nowhere else.
    const double elsewhere = (plan_.locals - 1.0) / plan_.locals;
    const double bytes = elements * bytes_of(plan_.partials) * elsewhere;
    compute(elements / elements_, &rank_->link, us_of(bytes, costs_->store_gb_s));
    return true;
  }
  void accumulate(const AccumulateJob& /*job*/) {}
  void sum(const SumJob& job) {
    const double bytes = double{1} * job.rows * job.columns * bytes_of(job.source_type);
    if (costs_->one_memory)
      return move(rank_->memory, bytes * (job.source_count + job.target_count), costs_->sum_sent);
    if (role_ == Role::kReduce)
      return move(rank_->sum_sent, bytes * reduced(job), costs_->sum_sent);
    move(rank_->sum_come, bytes * come(job), costs_->sum_come);
  }
  static bool wants_c() { return false; }
  static void copy_to_c(const TileRect&, const void*, std::uint64_t) {}
  static void* c_at(const TileRect&) { return nullptr; }
  static std::uint64_t c_stride() { return 0; }

 protected:
  /// As Work (kernels/plan/model.h) counts them, in tiles: read for the network; on one node read
  /// and written, or stored on the peers.
  virtual double reduced(const SumJob& job) const { return job.source_count; }
  virtual double come(const SumJob& job) const { return job.source_count + 1.0; }
  ~SumExecutor() = default;

  const SumGeometry& plan_;
  double elements_;
};

/// Every worker of the role has a part of each sum.
std::uint32_t parts_of(const Launch& launch, Role role) {
  return role == Role::kReduce ? launch.blocks.reduce : launch.blocks.receive;
}

struct AllReduce {
  static constexpr const char* kName = "gemm_ar";
  using Plan = GemmArPlan;
  using OperatorLaunch = GemmArLaunch;
  static constexpr std::optional<Role> kThen = Role::kCollect;
  class Executor final : public SumExecutor {
    using SumExecutor::SumExecutor;
    double reduced(const SumJob& job) const override {
      return plan_.nodes == 1 ? job.target_count - 1.0 : job.source_count;
    }
    double come(const SumJob& job) const override {
      // A finished tile that is handed out is read once.
      const double stored = std::max(1.0, job.target_count - 1.0);
      return job.source_count == 1 ? stored : stored + (job.source_count - 2.0);
    }
  };
  static void choose(OperatorLaunch& launch, const plan::Candidate& candidate) {
    launch.accumulates_own = candidate.sums == plan::Sums::kOwn;
  }
  static bool run_role(Executor& executor, const OperatorLaunch& launch, Role role,
                       std::uint32_t index, BlockTotals& totals) {
    GemmArBlock block(executor, launch, role, index, totals);
    return gemm_ar::run_role(block, role, parts_of(launch, role));
  }
};

struct ReduceScatter {
  static constexpr const char* kName = "gemm_rs";
  using Plan = GemmRsPlan;
  using OperatorLaunch = GemmRsLaunch;
  static constexpr std::optional<Role> kThen = std::nullopt;
  class Executor final : public SumExecutor {
    using SumExecutor::SumExecutor;
    double reduced(const SumJob& job) const override {
      return plan_.nodes == 1 ? job.source_count + 1.0 : job.source_count;
    }
  };
  static void choose(OperatorLaunch& launch, const plan::Candidate& candidate) {
    launch.accumulates_own = candidate.sums == plan::Sums::kOwn;
    launch.sums_once = candidate.sums == plan::Sums::kOnce;
  }
  static bool run_role(Executor& executor, const OperatorLaunch& launch, Role role,
                       std::uint32_t index, BlockTotals& totals) {
    GemmRsBlock block(executor, launch, role, index, totals);
    return gemm_rs::run_role(block, role, parts_of(launch, role));
  }
};

template <class Op>
class SumRun : public PlannedRun<typename Op::Plan, typename Op::OperatorLaunch> {
  using Base = PlannedRun<typename Op::Plan, typename Op::OperatorLaunch>;
  using Base::launches_;
  using Base::plan_;
  using Base::setup_;

 public:
  SumRun(const RunSetup& setup, const typename Op::Plan& plan)
      : Base(setup, plan, plan.banks, setup.problem.shape.m) {
    for (auto& launch : launches_) Op::choose(launch, setup.candidate);
  }
  const char* name() const override { return Op::kName; }
  NodeNumbers numbers() const override {
    NodeNumbers numbers;
    if (plan_.nodes == 1) return numbers;
    numbers.flags = {plan_.flags()};
    numbers.regions = {{plan_.layout.receive, plan_.layout.bank_bytes, plan_.banks,
                        ReceiveRegion::Planes::kPeers}};
    if constexpr (requires { plan_.two_shot; }) {
      if (plan_.two_shot)
        numbers.regions.push_back({plan_.layout.finished, plan_.layout.finished_bytes, plan_.banks,
                                   ReceiveRegion::Planes::kNodes});
    }
    return numbers;
  }
  std::vector<RoleThread> threads(const World& world) const override {
    const RoleBlocks& blocks = setup_.blocks;
    std::vector<RoleThread> threads;
    add_role(threads, Role::kCompute, blocks.compute, Op::kThen);
    if (world.locals > 1) add_role(threads, Role::kReduce, blocks.reduce);
    if (world.nodes > 1) add_role(threads, Role::kSend, blocks.send);
    if (world.nodes > 1) add_role(threads, Role::kReceive, blocks.receive);
    return threads;
  }
  void begin(std::uint32_t rank) override { launches_[rank].make_schedule(); }
  bool run_role(std::uint32_t rank, Role role, std::uint32_t index, BlockTotals& totals,
                VirtualThreads& threads, RankState& state, const Costs& costs) override {
    typename Op::Executor executor(threads, state, costs, role, plan_, launches_[rank].m);
    return Op::run_role(executor, launches_[rank], role, index, totals);
  }
};

template <class Op>
Result<std::unique_ptr<OperatorRun>> make(const RunSetup& setup) {
  const plan::Problem& problem = setup.problem;
  MK_ASSIGN_OR_RETURN(const typename Op::Plan plan,
                      Op::Plan::make(problem.nodes, problem.locals, problem.shape, problem.dtype,
                                     setup.candidate.tiling, problem.result));
  return std::make_unique<SumRun<Op>>(setup, plan);
}

}  // namespace

Result<std::unique_ptr<OperatorRun>> make_sum_run(const RunSetup& setup, plan::MachineKind) {
  return setup.problem.op == plan::Op::kGemmAr ? make<AllReduce>(setup)
                                               : make<ReduceScatter>(setup);
}

}  // namespace mk::sim
