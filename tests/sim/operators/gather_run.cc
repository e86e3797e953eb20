// AllGather+GEMM and Ring Attention.
#include <algorithm>
#include <optional>
#include <utility>

#include "kernels/ops/ag_gemm/roles.h"
#include "kernels/ops/ag_gemm/spec.h"
#include "kernels/ops/ring/roles.h"
#include "kernels/ops/ring/spec.h"
#include "kernels/plan/operator_work.h"
#include "tests/sim/operators/operator_run.h"

namespace mk::sim {
namespace {

using namespace kernels;  // NOLINT(google-build-using-namespace): the operators' vocabulary

/// The roles of a gather, where the world has a use for them.
void add_gather_roles(std::vector<RoleThread>& threads, const World& world,
                      const RoleBlocks& blocks) {
  if (world.size() > 1) add_role(threads, Role::kShare, blocks.share);
  if (world.nodes > 1) add_role(threads, Role::kSend, blocks.send);
  if (world.nodes > 1 && world.locals > 1) add_role(threads, Role::kReceive, blocks.receive);
}

void add_numbers(const GatherGeometry& gather, NodeNumbers& numbers, bool whole = false) {
  if (gather.nodes == 1) return;
  numbers.flags.push_back({gather.nodes, gather.banks, gather.chunks_max, gather.first_flag});
  numbers.regions.push_back({gather.layout.slots, gather.layout.slot_bytes, gather.banks,
                             gather.kind == GatherKind::kBroadcast ? ReceiveRegion::Planes::kRanks
                                                                   : ReceiveRegion::Planes::kNodes,
                             whole});
}

// --- AllGather+GEMM ---

class AgGemmExecutor : public VirtualExecutor {
 public:
  AgGemmExecutor(VirtualThreads& threads, RankState& rank, const Costs& costs, Role role,
                 const AgGemmLaunch& launch)
      : VirtualExecutor(threads, rank, costs, role),
        elements_(double{1} * launch.m * launch.plan.max.n),
        to_own_(launch.plan.nodes > 1 && !launch.in_place) {}

  bool multiply(const AgGemmTile& tile, const std::byte* /*rows*/, std::uint64_t /*stride*/) {
    compute(double{1} * tile.rect.rows * tile.rect.columns / elements_);
    return true;
  }
  void copy(const CopyJob& job) { VirtualExecutor::copy(job, role_ == Role::kShare && to_own_); }

 private:
  double elements_;
  bool to_own_;
};

class AgGemmRun : public OperatorRun {
 public:
  AgGemmRun(const RunSetup& setup, const AgGemmPlan& plan)
      : setup_(setup), plan_(plan), launches_(setup.simulated_ranks()) {
    for (AgGemmLaunch& launch : launches_) {
      launch.plan = plan_;
      launch.banks = plan_.gather.banks;
      launch.m = setup.problem.shape.m;
    }
  }
  const char* name() const override { return "ag_gemm"; }
  std::uint64_t workspace_bytes() const override { return plan_.workspace_bytes; }
  std::uint32_t flag_count() const override { return plan_.flag_count(); }
  NodeNumbers numbers() const override {
    NodeNumbers numbers;
    add_numbers(plan_.gather, numbers);
    return numbers;
  }
  Launch& launch(std::uint32_t rank) override { return launches_[rank]; }
  std::vector<RoleThread> threads(const World& world) const override {
    std::vector<RoleThread> threads;
    add_role(threads, Role::kCompute, setup_.blocks.compute, Role::kCollect);
    add_gather_roles(threads, world, setup_.blocks);
    return threads;
  }
  void begin(std::uint32_t rank) override {
    AgGemmLaunch& launch = launches_[rank];
    launch.make_schedule();
    const World& world = launch.context.world;
    const std::uint32_t rows = shard_of(launch.m, world.size(), world.rank()).count;
    // Nobody reads them.
    launch.shard = GatherSource::of(launch.context.workspaces[world.local], plan_.gather.row_bytes,
                                    plan_.gather.row_bytes, rows);
    launch.in_place = setup_.problem.in_place && world.nodes > 1;
    launch.sharing.parts = setup_.blocks.share;
    launch.sharing.network_first = world.locals > 1 ? 1000000 : 0;
    launch.onward.parts = setup_.blocks.receive;
  }
  bool run_role(std::uint32_t rank, Role role, std::uint32_t index, BlockTotals& totals,
                VirtualThreads& threads, RankState& state, const Costs& costs) override {
    const AgGemmLaunch& launch = launches_[rank];
    AgGemmExecutor executor(threads, state, costs, role, launch);
    AgGemmBlock<AgGemmExecutor> block(executor, launch, role, index, totals);
    switch (role) {
      case Role::kCompute:
        return ag_gemm::compute(block);
      case Role::kCollect:
        return ag_gemm::collect(block);
      case Role::kShare:
        return ag_gemm::share(block);
      case Role::kSend:
        return ag_gemm::send(block);
      default:
        return ag_gemm::receive(block);
    }
  }

 private:
  const RunSetup setup_;
  const AgGemmPlan plan_;
  std::vector<AgGemmLaunch> launches_;
};

// --- Ring Attention ---

class RingExecutor : public VirtualExecutor {
 public:
  RingExecutor(VirtualThreads& threads, RankState& rank, const Costs& costs, Role role,
               double pairs)
      : VirtualExecutor(threads, rank, costs, role), pairs_(pairs) {}

  void begin(const AttentionItem&) {}
  void resume(const AttentionItem&) {}
  void put_aside(const AttentionItem&) {}
  void finish(const AttentionItem&) {}
  /// `all`: else query row i sees keys j <= i + diagonal.
  void attend(const AttentionItem& item, const AttentionKeys& keys, bool all,
              std::int64_t diagonal) {
    double seen = double{1} * item.query.rows * keys.rows;
    if (!all) {
      seen = 0;
      for (std::int64_t row = 0; row < item.query.rows; ++row)
        seen += static_cast<double>(std::clamp<std::int64_t>(row + diagonal + 1, 0, keys.rows));
    }
    compute(seen / pairs_);
  }

 private:
  double pairs_;  ///< of a query row and a key, that this rank has in all
};

class RingRun : public OperatorRun {
 public:
  RingRun(const RunSetup& setup, const RingAttentionPlan& plan)
      : setup_(setup), plan_(plan), launches_(setup.simulated_ranks()) {
    for (RingAttentionLaunch& launch : launches_) {
      launch.plan = plan_;
      launch.banks = plan_.banks;
      launch.m = setup.problem.shape.m;
    }
  }
  const char* name() const override { return "ring_attention"; }
  std::uint64_t workspace_bytes() const override { return plan_.workspace_bytes; }
  std::uint32_t flag_count() const override { return plan_.flag_count(); }
  NodeNumbers numbers() const override {
    NodeNumbers numbers;
    add_numbers(plan_.gather, numbers);
    return numbers;
  }
  Launch& launch(std::uint32_t rank) override { return launches_[rank]; }
  std::vector<RoleThread> threads(const World& world) const override {
    std::vector<RoleThread> threads;
    add_role(threads, Role::kCompute, setup_.blocks.compute);
    add_gather_roles(threads, world, setup_.blocks);
    return threads;
  }
  void begin(std::uint32_t rank) override {
    RingAttentionLaunch& launch = launches_[rank];
    const World& world = launch.context.world;
    const RingAttentionSchedule schedule(plan_, world, launch.m, launch.mode);
    // Nobody reads them: wherever.
    const std::uint64_t line = plan_.head_bytes();
    const std::uint32_t pairs = plan_.head_pairs();
    const HeadTensor tensor{launch.context.workspaces[world.local], plan_.key_heads * line,
                            pairs * line, line};
    launch.keys_values = KeySource::of(plan_, tensor, tensor, schedule.rows(world.rank()));
  }
  bool run_role(std::uint32_t rank, Role role, std::uint32_t index, BlockTotals& totals,
                VirtualThreads& threads, RankState& state, const Costs& costs) override {
    const RingAttentionLaunch& launch = launches_[rank];
    // Two products of head_dim for each pair and query head.
    const double flops = plan_.work(launch.context.world, launch.m).flops;
    const double of_pair = 4.0 * plan_.head_dim * (plan_.query_heads / plan_.key_heads);
    RingExecutor executor(threads, state, costs, role, flops / of_pair);
    RingAttentionBlock<RingExecutor> block(executor, launch, role, index, totals);
    switch (role) {
      case Role::kCompute:
        return ring_attention::compute(block);
      case Role::kShare:
        return ring_attention::share(block);
      case Role::kSend:
        return ring_attention::send(block);
      default:
        return ring_attention::receive(block);
    }
  }

 private:
  const RunSetup setup_;
  const RingAttentionPlan plan_;
  std::vector<RingAttentionLaunch> launches_;
};

}  // namespace

Result<std::unique_ptr<OperatorRun>> make_gather_run(const RunSetup& setup,
                                                     plan::MachineKind kind) {
  const plan::Problem& problem = setup.problem;
  if (problem.op == plan::Op::kAgGemm) {
    MK_ASSIGN_OR_RETURN(const AgGemmPlan made,
                        AgGemmPlan::make(problem.nodes, problem.locals, problem.shape,
                                         problem.dtype, setup.candidate.tiling));
    return std::make_unique<AgGemmRun>(setup, made);
  }
  RingAttentionShape shape;
  shape.seq_max = problem.shape.m;
  shape.query_heads = problem.shape.n;
  shape.key_heads = problem.heads.key_heads != 0 ? problem.heads.key_heads : problem.shape.n;
  shape.head_dim = problem.shape.k;
  shape.causal = problem.heads.causal;
  shape.dtype = problem.dtype;
  shape.batch = std::max(1u, problem.heads.batch);
  RingAttentionTiling tiles =
      kind == plan::MachineKind::kGpu ? ring_attention_cuda_tiling(shape) : RingAttentionTiling{};
  tiles.chunk_bytes = setup.candidate.tiling.chunk_bytes;
  tiles.banks = setup.candidate.tiling.banks;
  // One window of heads after the other would take as long: what it saves is memory, which nobody
  // touches here.
  tiles.window_pairs = shape.batch * shape.key_heads;
  MK_ASSIGN_OR_RETURN(const RingAttentionPlan made,
                      RingAttentionPlan::make(problem.nodes, problem.locals, shape, tiles));
  return std::make_unique<RingRun>(setup, made);
}

}  // namespace mk::sim
