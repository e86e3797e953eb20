#include "kernels/ops/gemm_rs/cpu.h"

#include <algorithm>
#include <array>
#include <utility>

#include "kernels/cpu/gemm_sum_runner.h"
#include "kernels/ops/gemm_rs/run_role.h"

namespace mk::kernels {
namespace {

/// What kernels/ops/gemm_rs/roles.h asks of an executor.
class CpuExecutor : public GemmSumExecutor {
 public:
  using GemmSumExecutor::GemmSumExecutor;

  void* c_at(const TileRect& rect) const { return matrices_.c_at(rect); }
  std::uint64_t c_stride() const { return matrices_.ldc; }
};

struct ReduceScatter {
  static constexpr const char* kName = "gemm_rs";
  using Plan = GemmRsPlan;
  using Launch = GemmRsLaunch;
  using Executor = CpuExecutor;
  static constexpr std::optional<Role> kAfterCompute = std::nullopt;

  static CpuGemm::TileShape largest_tile(const Plan& plan) {
    return {std::min(plan.tile_m, shard_rows_max(plan.max.m, plan.nodes * plan.locals)),
            GemmRsSchedule(plan, plan.max.m).large_grid().tile_cols()};
  }
  static std::array<TileGrid, 2> grids(const Plan& plan, std::uint32_t m) {
    const GemmRsSchedule schedule(plan, m);
    return {schedule.small_grid(), schedule.large_grid()};
  }
  static Status check(const World& world, const GemmMatrices& matrices, std::uint32_t m) {
    const ShardRange rows = shard_of(m, world.size(), world.rank());
    if (matrices.c == nullptr && rows.count != 0) {
      return fail(ErrorCode::kInvalidArgument, "gemm_rs: c is null, but of {} rows rank {} gets {}",
                  m, world.rank(), rows.count);
    }
    return {};
  }

  static std::uint32_t sums(const Launch& launch) { return launch.pieces_reduced(); }
  static bool sum_ready(const Launch& launch, std::uint32_t task) {
    const World& world = launch.context.world;
    const GemmRsSchedule& schedule = launch.schedule;
    const GemmRsSchedule::Piece piece = schedule.piece_at(world.node, world.local, task);
    const PackedTiles packed = schedule.packed(world.rail_peer(piece.node));
    return partials_seen(launch, packed.chunk_tiles(piece.chunk),
                         [&](std::uint32_t source, std::uint32_t tile) {
                           return schedule.tile_ready(source, piece.node, tile);
                         });
  }
  static bool run_role(Executor& executor, const Launch& launch, Role role, std::uint32_t index,
                       BlockTotals& totals) {
    GemmRsBlock<Executor> block(executor, launch, role, index, totals);
    return gemm_rs::run_role(block, role);
  }
};

}  // namespace

class GemmRsCpu::Impl : public GemmSumRunner<ReduceScatter> {
 public:
  using GemmSumRunner::GemmSumRunner;
};

GemmRsCpu::GemmRsCpu(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
GemmRsCpu::~GemmRsCpu() = default;

Result<std::unique_ptr<GemmRsCpu>> GemmRsCpu::create(const GemmRsPlan& plan, std::uint32_t k,
                                                     const RankContext& context,
                                                     const GemmCpuOptions& options) {
  MK_ASSIGN_OR_RETURN(auto impl, Impl::create<Impl>(plan, k, context, options));
  return std::unique_ptr<GemmRsCpu>(new GemmRsCpu(std::move(impl)));
}

Result<LaunchStats> GemmRsCpu::launch(const void* a, std::uint64_t lda, const void* b,
                                      std::uint64_t ldb, void* c, std::uint64_t ldc,
                                      std::uint32_t m, Mode mode, const void* bias) {
  return impl_->launch(a, lda, b, ldb, c, ldc, m, mode, bias);
}

const GemmRsPlan& GemmRsCpu::plan() const { return impl_->plan(); }
std::uint32_t GemmRsCpu::epoch() const { return impl_->epoch(); }
LaunchRunner& GemmRsCpu::runner() { return impl_->runner(); }

}  // namespace mk::kernels
