// MoE Dispatch+GEMM and GEMM+Combine.
#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/ops/combine/run_role.h"
#include "kernels/ops/combine/spec.h"
#include "kernels/ops/moe/roles.h"
#include "kernels/ops/moe/spec.h"
#include "tests/kernels/moe/run_role.h"
#include "tests/kernels/support/gather_roles.h"
#include "tests/sim/operators/operator_run.h"
#include "tests/sim/operators/routing.h"

namespace mk::sim {
namespace {

using namespace kernels;  // NOLINT(google-build-using-namespace): the operators' vocabulary

std::uint32_t tokens_of_rank(const plan::Problem& problem) {
  return div_up(problem.shape.m, problem.ranks());
}
JobRouting routing_of(const RunSetup& setup) {
  const plan::Problem& problem = setup.problem;
  return JobRouting({problem.nodes, problem.locals, tokens_of_rank(problem), problem.experts.count,
                     problem.experts.top_k},
                    setup.routing_seed);
}

// --- MoE Dispatch+GEMM ---

class MoeExecutor : public VirtualExecutor {
 public:
  MoeExecutor(VirtualThreads& threads, RankState& rank, const Costs& costs, Role role,
              const MoeDispatchLaunch& launch)
      : VirtualExecutor(threads, rank, costs, role), launch_(launch) {}

  void copy(const CopyJob& job) {
    bool table = false;
    for (std::uint32_t i = 0; i < job.target_count; ++i) table |= copy_table(job, job.targets[i]);
    // Few bytes, which stand in nobody's way.
    if (table && !costs_->one_memory)
      return move(rank_->tables, double{1} * job.rows * job.row_bytes, costs_->share);
    if (role_ == Role::kPull && !costs_->one_memory)
      return move(rank_->memory, double{1} * job.rows * job.row_bytes, costs_->pull);
    VirtualExecutor::copy(job, role_ == Role::kShare && launch_.plan.nodes > 1);
  }
  std::uint32_t take_step(Role role) { return rank_->steps_taken[role]++; }
  /// Rows are looked at twice: how many there are, and where each goes.
  void count(const RoutingPlan& plan, std::uint32_t part, const RoutingTable& table) {
    plan.count(part, table);
    look_at(plan);
  }
  void fill(const RoutingPlan& plan, std::uint32_t part, const RoutingTable& table) {
    plan.fill(part, table);
    look_at(plan);
  }
  bool multiply(const RowTile& tile, std::uint32_t /*packed_rows*/, const TileRect& columns,
                const std::byte* /*packed*/) {
    const MoeDispatchShape& shape = launch_.plan.shape;
    const double even = double{1} * shape.tokens_max * shape.top_k * shape.features;
    compute(double{1} * tile.rows * columns.columns / even);
    return true;
  }

 private:
  void look_at(const RoutingPlan& plan) {
    const double us = costs_->routing_us / 2 / plan.shape().parts();
    threads_->sleep_until(rank_->plan.serve(threads_->now_us(), us));
  }
  /// Routing is read by those who plan.
  bool copy_table(const CopyJob& job, std::byte* target) const {
    const GatherGeometry& routing = launch_.plan.routing;
    const World& world = launch_.context.world;
    const std::uint64_t bytes =
        std::uint64_t{routing.banks} * world.size() * routing.layout.slot_bytes;
    for (std::uint32_t local = 0; local < world.locals; ++local) {
      const std::byte* const slots = launch_.context.workspaces[local] + routing.layout.slots;
      if (target < slots || target >= slots + bytes) continue;
      for (std::uint32_t row = 0; row < job.rows; ++row)
        std::memcpy(target + row * job.target_stride, job.source + row * job.source_stride,
                    job.row_bytes);
      return true;
    }
    return false;
  }

  const MoeDispatchLaunch& launch_;
};

class MoeRun : public PlannedRun<MoeDispatchPlan, MoeDispatchLaunch> {
 public:
  MoeRun(const RunSetup& setup, const MoeDispatchPlan& plan)
      : PlannedRun(setup, plan, plan.banks, kMoeDispatchM),
        routing_(routing_of(setup)),
        tables_(launches_.size()) {
    for (std::uint32_t rank = 0; rank < launches_.size(); ++rank) {
      MoeDispatchLaunch& launch = launches_[rank];
      tables_[rank] = routing_.table(rank);
      launch.routing = tables_[rank].view(plan_.shape.tokens_max, plan_.shape.top_k);
      launch.capacity = plan_.shape.rows_max;
    }
  }
  const char* name() const override { return "moe_dispatch"; }
  NodeNumbers numbers() const override {
    NodeNumbers numbers;
    if (plan_.nodes == 1) return numbers;
    add_gather_numbers(plan_.routing, numbers, true);
    add_gather_numbers(plan_.tokens, numbers);
    numbers.turn = [this](std::uint32_t, std::byte* workspace, std::uint64_t offset,
                          std::uint64_t bytes,
                          std::uint32_t distance) { turn(workspace, offset, bytes, distance); };
    return numbers;
  }
  std::vector<RoleThread> threads(const World& world) const override {
    const RoleBlocks& blocks = setup_.blocks;
    std::vector<RoleThread> threads;
    add_role(threads, Role::kCompute, blocks.compute);
    add_role(threads, Role::kPlan, blocks.plan);
    add_role(threads, Role::kPull, blocks.pull);
    kernels::testing::add_gather_roles(threads, world, blocks);
    return threads;
  }
  void begin(std::uint32_t rank) override {
    MoeDispatchLaunch& launch = launches_[rank];
    // Nobody reads them.
    launch.tokens = launch.context.workspaces[launch.context.world.local];
  }
  bool run_role(std::uint32_t rank, Role role, std::uint32_t index, BlockTotals& totals,
                VirtualThreads& threads, RankState& state, const Costs& costs) override {
    MoeExecutor executor(threads, state, costs, role, launches_[rank]);
    MoeDispatchBlock<MoeExecutor> block(executor, launches_[rank], role, index, totals);
    return kernels::testing::run_moe_dispatch_role(block, role);
  }

 private:
  /// The experts of a table's rows, which the node `distance` before the mirror's has sent.
  void turn(std::byte* workspace, std::uint64_t offset, std::uint64_t bytes,
            std::uint32_t distance) const {
    const GatherLayout& layout = plan_.routing.layout;
    const std::uint64_t end =
        layout.slots + std::uint64_t{plan_.routing.banks} * slots() * layout.slot_bytes;
    if (offset < layout.slots || offset >= end) return;
    const std::uint32_t row_words = 2 * plan_.shape.top_k;
    const std::uint64_t within = (offset - layout.slots) % layout.slot_bytes;
    for (std::uint64_t at = 0; at < bytes; at += 4) {
      if (within + at < kGatherHeaderBytes) continue;
      const std::uint64_t word = (within + at - kGatherHeaderBytes) / 4;
      if (word % row_words >= plan_.shape.top_k) continue;
      auto* const id = reinterpret_cast<std::int32_t*>(workspace + offset + at);
      *id = routing_.turned(*id, plan_.nodes - distance);
    }
  }
  std::uint64_t slots() const {
    return plan_.routing.kind == GatherKind::kBroadcast ? plan_.nodes * plan_.locals : plan_.nodes;
  }

  const JobRouting routing_;
  std::vector<JobRouting::Table> tables_;
};

// --- GEMM+Combine ---

class CombineExecutor : public VirtualExecutor {
 public:
  CombineExecutor(VirtualThreads& threads, RankState& rank, const Costs& costs, Role role,
                  const CombineLaunch& launch)
      : VirtualExecutor(threads, rank, costs, role), plan_(launch.plan) {}

  template <class PlaceOf>
  bool multiply(const CombineTile& tile, std::uint32_t /*padded_rows*/, const TileRect& columns,
                PlaceOf&&) {
    const CombineShape& shape = plan_.shape;
    const double elements = double{1} * tile.rows * columns.columns;
    const double even = double{1} * shape.tokens_max * shape.top_k * shape.hidden;
    if (costs_->one_memory) {
      compute(elements / even, &rank_->memory,
              us_of(elements * plan_.partial_bytes(), costs_->share.beside));
      return true;
    }
    const double elsewhere = (plan_.locals - 1.0) / plan_.locals;
    compute(elements / even, &rank_->link,
            us_of(elements * plan_.partial_bytes() * elsewhere, costs_->store_gb_s));
    return true;
  }
  template <class Before, class Rows, class After>
  void sum(const CombineSum& job, Before&& before, Rows&& rows, After&& after) {
    double moved = 1;
    const auto add = [&moved](const std::byte*) { ++moved; };
    before(add);
    rows(add);
    after(add);
    // The network reads again a sum for another node.
    if (job.target != nullptr) ++moved;
    move(rank_->memory, moved * plan_.shape.hidden * plan_.partial_bytes(), costs_->sum_sent);
  }

 private:
  const CombineGeometry& plan_;
};

class CombineRun : public PlannedRun<CombinePlan, CombineLaunch> {
 public:
  CombineRun(const RunSetup& setup, const CombinePlan& plan)
      : PlannedRun(setup, plan, plan.banks, 1),
        routing_(routing_of(setup)),
        tables_(launches_.size()),
        handles_(launches_.size()) {
    for (std::uint32_t rank = 0; rank < launches_.size(); ++rank) {
      CombineLaunch& launch = launches_[rank];
      tables_[rank] = routing_.table(rank);
      handles_[rank] = routing_.handle(rank);
      launch.rows = handles_[rank].rows.data();
      launch.room = static_cast<std::uint32_t>(handles_[rank].rows.size());
      launch.offsets = handles_[rank].offsets.data();
      launch.routing = tables_[rank].view(plan_.shape.tokens_max, plan_.shape.top_k);
    }
  }
  const char* name() const override { return "gemm_combine"; }
  NodeNumbers numbers() const override {
    NodeNumbers numbers;
    if (plan_.nodes == 1) return numbers;
    numbers.flags = {plan_.flags()};
    numbers.regions = {{plan_.layout.receive, plan_.layout.bank_bytes, plan_.banks,
                        ReceiveRegion::Planes::kPeers}};
    numbers.turn = [this](std::uint32_t local, std::byte* workspace, std::uint64_t offset,
                          std::uint64_t bytes, std::uint32_t distance) {
      if ((offset - plan_.layout.receive) % plan_.layout.bank_bytes == 0 && bytes != 0)
        turn(local, workspace + offset, distance);
    };
    return numbers;
  }
  std::vector<RoleThread> threads(const World& world) const override {
    return gemm_combine::threads_of(setup_.blocks, world);
  }
  void begin(std::uint32_t) override {}
  bool run_role(std::uint32_t rank, Role role, std::uint32_t index, BlockTotals& totals,
                VirtualThreads& threads, RankState& state, const Costs& costs) override {
    CombineExecutor executor(threads, state, costs, role, launches_[rank]);
    CombineBlock<CombineExecutor> block(executor, launches_[rank], role, index, totals);
    return gemm_combine::run_role(block, role);
  }

 private:
  /// The checks of a header that the node `distance` before the mirror's has sent to `local`: of
  /// what the mirror's tokens have there.
  void turn(std::uint32_t local, std::byte* bank, std::uint32_t distance) const {
    auto* const checks = reinterpret_cast<std::uint64_t*>(bank + sizeof(CombineHeader));
    std::fill(checks, checks + plan_.locals, 0);
    const std::uint32_t node = (plan_.nodes - distance) % plan_.nodes;
    const std::uint32_t ranks = plan_.nodes * plan_.locals;
    for (std::uint32_t token = 0; token < plan_.shape.tokens_max; ++token) {
      for (std::uint32_t slot = 0; slot < plan_.shape.top_k; ++slot) {
        const auto expert = static_cast<std::uint32_t>(routing_.id(local, token, slot));
        const std::uint32_t rank = rank_of_expert(expert, plan_.shape.experts, ranks);
        if (rank / plan_.locals != node) continue;
        const std::uint64_t place = std::uint64_t{token} * plan_.shape.top_k + slot;
        checks[rank % plan_.locals] += combine_hash(place * plan_.shape.experts + expert);
      }
    }
    for (std::uint32_t i = 0; i < plan_.locals; ++i) checks[i] &= ~kCombineIncomplete;
  }

  const JobRouting routing_;
  std::vector<JobRouting::Table> tables_;
  std::vector<JobRouting::Handle> handles_;
};

/// A mirror needs nodes that are alike.
Status check_experts(const RunSetup& setup) {
  const plan::Problem& problem = setup.problem;
  if (!setup.mirrored || problem.experts.count % problem.ranks() == 0) return {};
  return fail(ErrorCode::kUnsupported,
              "{}: nodes are alike only where each rank has as many experts; {} over {} ranks are "
              "not: simulate every node, or take a multiple",
              plan::name_of(problem.op), problem.experts.count, problem.ranks());
}

}  // namespace

Result<std::unique_ptr<OperatorRun>> make_expert_run(const RunSetup& setup,
                                                     plan::MachineKind kind) {
  const plan::Problem& problem = setup.problem;
  MK_RETURN_IF_ERROR(check_experts(setup));
  const std::uint32_t tokens = tokens_of_rank(problem);
  if (problem.op == plan::Op::kMoe) {
    MoeDispatchShape shape;
    shape.tokens_max = tokens;
    shape.hidden = problem.shape.k;
    shape.features = problem.shape.n;
    shape.experts = problem.experts.count;
    shape.top_k = problem.experts.top_k;
    const MoeDispatchWay way =
        kind == plan::MachineKind::kGpu ? moe_dispatch_cuda_way(problem.nodes) : MoeDispatchWay{};
    MK_ASSIGN_OR_RETURN(const MoeDispatchPlan made,
                        MoeDispatchPlan::make(problem.nodes, problem.locals, shape, problem.dtype,
                                              setup.candidate.tiling, way));
    return std::make_unique<MoeRun>(setup, made);
  }
  CombineShape shape;
  shape.tokens_max = tokens;
  shape.hidden = problem.shape.n;
  shape.features = problem.shape.k;
  shape.experts = problem.experts.count;
  shape.top_k = problem.experts.top_k;
  const auto with_steps = [&](auto... steps) {
    return CombinePlan::make(problem.nodes, problem.locals, shape, problem.dtype,
                             setup.candidate.tiling, steps...);
  };
  MK_ASSIGN_OR_RETURN(const CombinePlan made, kind == plan::MachineKind::kGpu
                                                  ? with_steps(combine_cuda_steps(problem.nodes))
                                                  : with_steps());
  return std::make_unique<CombineRun>(setup, made);
}

}  // namespace mk::sim
