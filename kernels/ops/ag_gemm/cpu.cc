#include "kernels/ops/ag_gemm/cpu.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "kernels/cpu/adaptive_roles.h"
#include "kernels/cpu/copy_rows.h"
#include "kernels/cpu/pacer.h"
#include "kernels/cpu/tile_gemm.h"
#include "kernels/gather/look.h"
#include "kernels/ops/ag_gemm/run_role.h"
#include "kernels/plan/account.h"

namespace mk::kernels {
namespace {

/// The caller's matrices of one launch.
struct Matrices {
  const std::uint16_t* a_shard = nullptr;
  std::uint64_t lda = 0;
  const std::uint16_t* b = nullptr;
  std::uint64_t ldb = 0;
  std::uint16_t* c = nullptr;
  std::uint64_t ldc = 0;
  std::uint16_t* gathered = nullptr;
  const std::uint16_t* bias = nullptr;
};

/// An executor for kernels/ops/ag_gemm/run_role.h: one block on one thread. Stores and
/// loads are this thread's own plain ones, so flags order them without further ado.
class CpuExecutor : public CpuPacer {
 public:
  CpuExecutor(TileGemm& tiles, const Matrices& matrices, const Epilogue& epilogue,
              std::uint32_t compute_block, AdaptiveRoles* adaptive)
      : tiles_(tiles),
        matrices_(matrices),
        epilogue_(epilogue),
        block_(compute_block),
        adaptive_(adaptive) {}

  bool multiply(const AgGemmTile& tile, const std::byte* rows, std::uint64_t stride_bytes) {
    const TileRect& rect = tile.rect;
    const TileRect to = epilogue_.result_of(rect);
    const TileOutput output{matrices_.c + to.row * matrices_.ldc + to.column, matrices_.ldc,
                            Partials::kElement, epilogue_.activation, matrices_.bias};
    return tiles_.multiply(block_, {rect.rows, rect.columns},
                           reinterpret_cast<const std::uint16_t*>(rows),
                           stride_bytes / kElementBytes, matrices_.b, rect.column, output);
  }
  void copy(const CopyJob& job) { copy_rows(job); }
  void stores_done() {}
  void loads_begin() {}
  /// Tiles are counted where each is a block of its own.
  bool counts_done(Role role) const { return adaptive_ != nullptr && role == Role::kCompute; }
  bool last_done(Role /*role*/, std::uint32_t count) { return adaptive_->last_tile(count); }

 private:
  TileGemm& tiles_;
  const Matrices& matrices_;
  const Epilogue& epilogue_;
  std::uint32_t block_;
  AdaptiveRoles* adaptive_;
};

/// Whether the rows that the `step`-th tile needs are seen to be here.
bool rows_seen(const AgGemmLaunch& launch, std::uint32_t step) {
  using Scheduler = AgGemmTileScheduler<AgGemmEvenSteps, AgGemmEvenSteps::Params>;
  const Scheduler::Params params{AgGemmOrder::of(launch)};
  Scheduler scheduler(params, static_cast<int>(step), static_cast<int>(params.order.tiles.tiles));
  Tile next;
  if (!scheduler.next(&next)) return true;
  const AgGemmTile tile = params.order.tiles.find(next);
  return gather::rows_seen(launch, launch.schedule.gather(), tile.origin, tile.row,
                           tile.row + tile.rect.rows);
}

std::vector<RoleThread> threads_of(const RoleBlocks& blocks, const World& world) {
  std::vector<RoleThread> threads;
  add_role(threads, Role::kCompute, blocks.compute, Role::kCollect);
  if (world.size() > 1) add_role(threads, Role::kShare, blocks.share);
  if (world.nodes > 1) add_role(threads, Role::kSend, blocks.send);
  if (world.nodes > 1 && world.locals > 1) add_role(threads, Role::kReceive, blocks.receive);
  return threads;
}

}  // namespace

class AgGemmCpu::Impl : private RoleBody {
 public:
  Impl(const AgGemmPlan& plan, const RankContext& context, const GemmCpuOptions& options)
      : plan_(plan),
        options_(options),
        launch_(make_launch<AgGemmLaunch>(plan, context, options.blocks, plan.gather.banks)),
        runner_("ag_gemm", launch_, *this, options) {}
  virtual ~Impl() = default;

  Status start() {
    const World& world = launch_.context.world;
    const TileGrid columns(1, plan_.max.n, plan_.tile_m, plan_.tile_n,
                           plan_.epilogue.column_step());
    // Smaller launches may have taller tiles.
    const CpuGemm::TileShape tile{std::min(plan_.tile_m, shard_rows_max(plan_.max.m, world.size())),
                                  columns.tile_cols()};
    MK_ASSIGN_OR_RETURN(
        tiles_, TileGemm::create(product_threads(), tile, plan_.max.n, plan_.max.k, plan_.dtype,
                                 options_.b_layout, options_.batch_invariant));
    rates_ = rank_rates(options_, world, tiles_->path());
    if (adaptive_) runner_.show_partition(adaptive_->board());
    return runner_.start(threads_of(launch_.blocks, world));
  }

  Result<LaunchStats> launch(const Matrices& matrices, std::uint32_t m, Mode mode) {
    const World& world = launch_.context.world;
    MK_RETURN_IF_ERROR(check_arguments(matrices, m));
    MK_ASSIGN_OR_RETURN(const bool in_place,
                        plan_.in_place(launch_.context, matrices.a_shard, matrices.lda));
    MK_RETURN_IF_ERROR(runner_.ready());
    launch_.in_place = in_place;
    matrices_ = matrices;
    launch_.shard =
        GatherSource::of(matrices.a_shard, matrices.lda * kElementBytes, plan_.gather.row_bytes,
                         shard_of(m, world.size(), world.rank()).count);
    launch_.bias = matrices.bias;
    launch_.gathered = reinterpret_cast<std::byte*>(matrices.gathered);
    if (const Status prepared = prepare_tiles(m); !prepared)
      return runner_.broken_by(prepared.error());
    return runner_.run(m, mode, plan::expected(plan_.work(world, m), rates_));
  }

  void* input() const { return plan_.input(launch_.context); }
  const AgGemmPlan& plan() const { return plan_; }
  std::uint32_t epoch() const { return launch_.epoch; }
  LaunchRunner& runner() { return runner_; }

 private:
  /// Those that may multiply.
  std::uint32_t product_threads() {
    const std::uint32_t compute = launch_.blocks.compute.count();
    if (!options_.adaptive || launch_.context.world.size() == 1) return compute;
    adaptive_.emplace(Role::kShare, compute, launch_.blocks.share.count());
    return adaptive_->workers();
  }
  void begin_launch() override {
    launch_.make_schedule();
    if (!adaptive_) return;
    const bool on = launch_.mode == Mode::kFused;
    const GatherSchedule& gather = launch_.schedule.gather();
    const std::uint32_t chunks =
        gather.chunks(launch_.schedule.shard(launch_.context.world.rank()).count);
    dealt_ = dealt_by_task(launch_, launch_.schedule.tiles());
    dealt_.blocks.share = std::max(1u, chunks);
    adaptive_->begin(on ? launch_.schedule.tiles() : 0, on ? chunks : 0);
  }
  LaunchTasks tasks() const override {
    return {launch_.schedule.tiles(), launch_.chunks_sent(), {plan_.max.n, plan_.max.k}};
  }
  bool run_role(Role role, std::uint32_t index, BlockTotals& totals) override {
    const bool adapts = adaptive_ && adaptive_->has(role);
    const std::uint32_t worker = adapts                   ? adaptive_->worker(role, index)
                                 : role == Role::kCompute ? index
                                                          : 0;
    const bool collects = adaptive_ && adaptive_->has(Role::kCompute) && role == Role::kCollect;
    CpuExecutor executor(*tiles_, matrices_, plan_.epilogue, worker,
                         adapts || collects ? &*adaptive_ : nullptr);
    if (collects) {
      // Its end says that rows may be overwritten. Threads that began by sharing read them, too.
      AgGemmBlock<CpuExecutor> block(executor, dealt_, role, index, totals);
      if (!block.await_blocks(Role::kCompute, dealt_.blocks.compute, kGatherHopsMax + 1))
        return false;
    }
    if (!adapts) return run_block(executor, launch_, role, index, totals);
    Tasks tasks{*this, executor, totals};
    return adaptive_->run(worker, tasks);
  }
  /// For take_task (partition_board.h). Rows that are shared wait for no tile.
  struct Tasks {
    Impl& impl;
    CpuExecutor& executor;
    BlockTotals& totals;

    bool ready(Work work, std::uint32_t task) const {
      return work == Work::kCommunicate || rows_seen(impl.dealt_, task);
    }
    bool run(Work work, std::uint32_t task) {
      const Role role = impl.adaptive_->role_of(work);
      if (!run_block(executor, impl.dealt_, role, task, totals)) return false;
      if (work == Work::kCompute) {
        AgGemmBlock<CpuExecutor>(executor, impl.dealt_, role, task, totals)
            .publish_done(impl.dealt_.blocks.compute);
      }
      return true;
    }
    static std::uint64_t now_ns() { return CpuPacer::now_ns(); }
  };
  static bool run_block(CpuExecutor& executor, const AgGemmLaunch& launch, Role role,
                        std::uint32_t index, BlockTotals& totals) {
    AgGemmBlock<CpuExecutor> block(executor, launch, role, index, totals);
    return ag_gemm::run_role(block, role);
  }
  Status role_error() const override { return tiles_->error(); }

  Status check_arguments(const Matrices& matrices, std::uint32_t m) const {
    const World& world = launch_.context.world;
    const std::uint32_t n = plan_.max.n;
    const std::uint32_t k = plan_.max.k;
    if (m < 1 || m > plan_.max.m) {
      return fail(ErrorCode::kInvalidArgument,
                  "ag_gemm: m = {} is not in 1 to {}, which the operator was made for", m,
                  plan_.max.m);
    }
    const ShardRange shard = shard_of(m, world.size(), world.rank());
    if (matrices.a_shard == nullptr && shard.count != 0) {
      return fail(ErrorCode::kInvalidArgument,
                  "ag_gemm: a is null, but of {} rows rank {} brings {}", m, world.rank(),
                  shard.count);
    }
    if (matrices.b == nullptr || matrices.c == nullptr) {
      return fail(ErrorCode::kInvalidArgument, "ag_gemm: {} is null",
                  matrices.b == nullptr ? "b" : "c");
    }
    const std::uint32_t b_side = options_.b_layout == BLayout::kKN ? n : k;
    const std::uint32_t c_side = plan_.result_columns();
    if (matrices.lda < k || matrices.ldb < b_side || matrices.ldc < c_side) {
      return fail(ErrorCode::kInvalidArgument,
                  "ag_gemm: leading dimensions a {}, b {}, c {} are too small; at least {}, {}, {}",
                  matrices.lda, matrices.ldb, matrices.ldc, k, b_side, c_side);
    }
    return check_bias("ag_gemm", plan_.epilogue, matrices.bias);
  }

  /// Shards are of two sizes at most; rows are the caller's or packed.
  Status prepare_tiles(std::uint32_t m) {
    const std::uint32_t world = launch_.context.world.size();
    const auto grid = [&](std::uint32_t rows) {
      return TileGrid(rows, plan_.max.n, plan_.tile_m, plan_.tile_n, plan_.epilogue.column_step());
    };
    const TileGrid grids[] = {grid(m / world), grid(shard_rows_max(m, world))};
    const std::uint64_t ldas[] = {matrices_.lda, plan_.max.k};
    return tiles_->prepare(grids, ldas, matrices_.ldb);
  }

  const AgGemmPlan plan_;
  const GemmCpuOptions options_;
  MachineRates rates_;
  Matrices matrices_;
  std::unique_ptr<TileGemm> tiles_;
  AgGemmLaunch launch_;
  AgGemmLaunch dealt_;                     ///< of an adaptive launch's tasks
  std::optional<AdaptiveRoles> adaptive_;  ///< if this rank has both kinds of work
  LaunchRunner runner_;                    ///< ends first: its threads use the rest
};

AgGemmCpu::AgGemmCpu(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
AgGemmCpu::~AgGemmCpu() = default;

Result<std::unique_ptr<AgGemmCpu>> AgGemmCpu::create(const AgGemmPlan& plan,
                                                     const RankContext& context,
                                                     const GemmCpuOptions& options) {
  MK_RETURN_IF_ERROR(check_options("ag_gemm", options));
  MK_RETURN_IF_ERROR(check_context("ag_gemm", plan.nodes, plan.locals, plan.flag_count(),
                                   options.blocks.send, context));
  auto impl = std::make_unique<Impl>(plan, context, options);
  MK_RETURN_IF_ERROR(impl->start());
  return std::unique_ptr<AgGemmCpu>(new AgGemmCpu(std::move(impl)));
}

Result<LaunchStats> AgGemmCpu::launch(const void* a_shard, std::uint64_t lda, const void* b,
                                      std::uint64_t ldb, void* c, std::uint64_t ldc,
                                      std::uint32_t m, Mode mode, void* gathered,
                                      const void* bias) {
  return impl_->launch(
      {static_cast<const std::uint16_t*>(a_shard), lda, static_cast<const std::uint16_t*>(b), ldb,
       static_cast<std::uint16_t*>(c), ldc, static_cast<std::uint16_t*>(gathered),
       static_cast<const std::uint16_t*>(bias)},
      m, mode);
}

void* AgGemmCpu::input() const { return impl_->input(); }
const AgGemmPlan& AgGemmCpu::plan() const { return impl_->plan(); }
std::uint32_t AgGemmCpu::epoch() const { return impl_->epoch(); }
LaunchRunner& AgGemmCpu::runner() { return impl_->runner(); }

}  // namespace mk::kernels
