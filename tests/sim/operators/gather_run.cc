// AllGather+GEMM and Ring Attention.
#include <algorithm>
#include <optional>
#include <utility>

#include "kernels/ops/ag_gemm/run_role.h"
#include "kernels/ops/ag_gemm/spec.h"
#include "kernels/ops/ring/items.h"
#include "kernels/ops/ring/roles.h"
#include "kernels/ops/ring/spec.h"
#include "kernels/plan/operator_work.h"
#include "tests/kernels/support/gather_roles.h"
#include "tests/sim/operators/operator_run.h"

namespace mk::sim {
namespace {

using namespace kernels;  // NOLINT(google-build-using-namespace): the operators' vocabulary

/// The roles of a gather, where the world has a use for them.
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

class AgGemmRun : public PlannedRun<AgGemmPlan, AgGemmLaunch> {
 public:
  AgGemmRun(const RunSetup& setup, const AgGemmPlan& plan)
      : PlannedRun(setup, plan, plan.gather.banks, setup.problem.shape.m) {}
  const char* name() const override { return "ag_gemm"; }
  NodeNumbers numbers() const override {
    NodeNumbers numbers;
    add_gather_numbers(plan_.gather, numbers);
    return numbers;
  }
  std::vector<RoleThread> threads(const World& world) const override {
    std::vector<RoleThread> threads;
    add_role(threads, Role::kCompute, setup_.blocks.compute, Role::kCollect);
    kernels::testing::add_gather_roles(threads, world, setup_.blocks);
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
    return ag_gemm::run_role(block, role);
  }
};

// --- Ring Attention ---

class RingExecutor : public VirtualExecutor {
 public:
  RingExecutor(VirtualThreads& threads, RankState& rank, const Costs& costs, Role role,
               double pairs)
      : VirtualExecutor(threads, rank, costs, role), pairs_(pairs) {}

  void committed() { threads_->sleep_until(threads_->now_us() + costs_->commit_us); }
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
    attend(seen);
  }
  /// So many pairs of a query row and a key, of all query heads of a key head.
  void attend(double seen) { compute(seen / pairs_); }

 private:
  double pairs_;  ///< that this rank has in all
};

/// The compute role of GPUs: which item next, and over which runs of keys, is theirs alone
/// (kernels/ops/ring/items.h). A dealer hands the items out.
class RingItemsOnGpu {
 public:
  RingItemsOnGpu(const RingAttentionPlan& plan, const World& world, std::uint32_t seq,
                 std::uint32_t blocks)
      : plan_(plan),
        world_(world),
        schedule_(plan, world, seq, Mode::kFused),
        tile_(static_cast<int>(ring_tile_queries(plan.head_dim))),
        keys_(static_cast<int>(ring_tile_keys(plan.head_dim))) {
    params_.batch = static_cast<int>(plan.batch);
    params_.heads = static_cast<int>(plan.query_heads);
    params_.tile_rows = tile_;
    params_.longest_first = plan.causal;
    for (std::uint32_t half = 0, row = 0; half < plan.parts_per_rank(); ++half) {
      const ShardRange part = schedule_.part(world.rank(), half);
      params_.parts.rows[half] = static_cast<int>(part.count);
      params_.parts.tiles[half] = (params_.parts.rows[half] + tile_ - 1) / tile_;
      ahead_[half] = static_cast<int>(part.first) - static_cast<int>(row);
      row += part.count;
    }
    const int last = plan.causal ? cuda::HeadSections::kLastOfBlock * static_cast<int>(blocks) : 0;
    params_.sections =
        cuda::HeadSections::of(params_.batch * params_.heads, cuda::ring_section(plan, world, seq),
                               params_.parts.tiles[0] + params_.parts.tiles[1], last);
  }

  bool run(RingAttentionBlock<RingExecutor>& block) {
    const cuda::RingItems items(params_);
    while (next_ < items.count()) {
      if (!compute_item(block, items.at(next_++))) return false;
    }
    block.publish_done(block.launch.blocks.compute);
    return true;
  }

 private:
  bool compute_item(RingAttentionBlock<RingExecutor>& block, const cuda::AttentionItem& item) {
    const auto pair = static_cast<std::uint32_t>(item.batch) * plan_.key_heads +
                      static_cast<std::uint32_t>(item.head) / plan_.group();
    const int first_part = item.first_row < params_.parts.rows[0] ? 0 : 1;
    for (std::uint32_t position = 0; position < world_.size(); ++position) {
      const std::uint32_t origin = schedule_.gather().origin_at(position);
      for (std::uint32_t half = 0, row = 0; half < plan_.parts_per_rank(); ++half) {
        const ShardRange part = schedule_.part(origin, half);
        cuda::KeyRange range;
        range.length = static_cast<int>(part.count);
        if (plan_.causal) range.offset = ahead_[first_part] - static_cast<int>(part.first);
        const int tiles = cuda::span_of(item, tile_, range, keys_).tiles;
        for (int tile = 0; tile < tiles; ++tile) {
          const int begin = tile * keys_;
          const int end = std::min(begin + keys_, range.length);
          if (!block.await_keys(origin, pair, row + static_cast<std::uint32_t>(begin),
                                static_cast<std::uint32_t>(end - begin)))
            return false;
          double seen = 0;
          const int rows_end = std::min(item.first_row + tile_, item.rows_end);
          for (int query = item.first_row; query < rows_end; ++query)
            seen += std::clamp(range.visible_to(query), begin, end) - begin;
          block.executor.attend(seen / plan_.group());
        }
        row += part.count;
      }
    }
    return true;
  }

  const RingAttentionPlan& plan_;
  const World world_;
  const RingAttentionSchedule schedule_;
  const int tile_;
  const int keys_;
  cuda::RingItems::Params params_;
  int ahead_[2] = {};  ///< of each part: a row's place in the sequence, less its place on the rank
  int next_ = 0;
};

class RingRun : public PlannedRun<RingAttentionPlan, RingAttentionLaunch> {
 public:
  RingRun(const RunSetup& setup, const RingAttentionPlan& plan, bool gpu)
      : PlannedRun(setup, plan, plan.banks, setup.problem.shape.m), gpu_(gpu) {}
  const char* name() const override { return "ring_attention"; }
  NodeNumbers numbers() const override {
    NodeNumbers numbers;
    add_gather_numbers(plan_.gather, numbers);
    return numbers;
  }
  std::vector<RoleThread> threads(const World& world) const override {
    std::vector<RoleThread> threads;
    add_role(threads, Role::kCompute, setup_.blocks.compute);
    kernels::testing::add_gather_roles(threads, world, setup_.blocks);
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
    if (gpu_)
      items_.push_back(
          std::make_unique<RingItemsOnGpu>(plan_, world, launch.m, setup_.blocks.compute));
  }
  bool run_role(std::uint32_t rank, Role role, std::uint32_t index, BlockTotals& totals,
                VirtualThreads& threads, RankState& state, const Costs& costs) override {
    const RingAttentionLaunch& launch = launches_[rank];
    // Two products of head_dim for each pair and query head.
    const double flops = plan_.work(launch.context.world, launch.m).flops;
    const double of_pair = 4.0 * plan_.head_dim * plan_.group();
    RingExecutor executor(threads, state, costs, role, flops / of_pair);
    RingAttentionBlock<RingExecutor> block(executor, launch, role, index, totals);
    switch (role) {
      case Role::kCompute:
        return gpu_ ? items_[rank]->run(block) : ring_attention::compute(block);
      case Role::kShare:
        return ring_attention::share(block);
      case Role::kSend:
        return ring_attention::send(block);
      default:
        return ring_attention::receive(block);
    }
  }

 private:
  const bool gpu_;
  std::vector<std::unique_ptr<RingItemsOnGpu>> items_;  ///< by rank; GPUs
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
  tiles.turn_chunks = setup.candidate.turn_chunks;
  // One window of heads after the other would take as long: what it saves is memory, which nobody
  // touches here.
  tiles.window_pairs = shape.batch * shape.key_heads;
  MK_ASSIGN_OR_RETURN(const RingAttentionPlan made,
                      RingAttentionPlan::make(problem.nodes, problem.locals, shape, tiles));
  return std::make_unique<RingRun>(setup, made, kind == plan::MachineKind::kGpu);
}

}  // namespace mk::sim
