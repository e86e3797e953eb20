#include "kernels/cpu/gemm_rs_cpu.h"

#include <algorithm>
#include <utility>

#include "kernels/cpu/cpu_rates.h"
#include "kernels/cpu/gemm_sum.h"
#include "kernels/gemm_rs/roles.h"

namespace mk::kernels {
namespace {

/// What kernels/gemm_rs/roles.h asks of an executor.
class CpuExecutor : public GemmSumExecutor {
 public:
  using GemmSumExecutor::GemmSumExecutor;

  void* c_at(const TileRect& rect) const { return matrices_.c_at(rect); }
  std::uint64_t c_stride() const { return matrices_.ldc; }
};

}  // namespace

class GemmRsCpu::Impl : private RoleBody {
 public:
  Impl(const GemmRsPlan& plan, std::uint32_t k, const RankContext& context,
       const GemmCpuOptions& options)
      : plan_(plan),
        k_(k),
        options_(options),
        math_(row_math(plan.dtype)),
        launch_(make_launch<GemmRsLaunch>(plan, context, options.blocks, plan.banks)),
        runner_("gemm_rs", launch_, *this, options.wait_timeout) {}
  virtual ~Impl() = default;

  Status start() {
    const World& world = launch_.context.world;
    const GemmRsSchedule largest(plan_, plan_.max.m);
    // Of any launch: smaller ones may have taller tiles.
    const CpuGemm::TileShape tile{std::min(plan_.tile_m, shard_rows_max(plan_.max.m, world.size())),
                                  largest.large_grid().tile_cols()};
    MK_ASSIGN_OR_RETURN(tiles_, TileGemm::create(launch_.blocks.compute, tile, plan_.max.n, k_,
                                                 plan_.dtype, options_.b_layout));
    rates_ = cpu_rates(options_.rates, launch_.context.world, launch_.blocks,
                       block_flops_per_s(tiles_->path()));
    return runner_.start(gemm_sum_threads(launch_.blocks, world, std::nullopt));
  }

  Result<LaunchStats> launch(const GemmMatrices& matrices, std::uint32_t m, Mode mode) {
    MK_RETURN_IF_ERROR(check_arguments(matrices, m));
    MK_RETURN_IF_ERROR(runner_.ready());
    matrices_ = matrices;
    const GemmRsSchedule schedule(plan_, m);
    const TileGrid grids[] = {schedule.small_grid(), schedule.large_grid()};
    const Status prepared = tiles_->prepare(grids, {&matrices_.lda, 1}, matrices_.ldb);
    if (!prepared) return runner_.broken_by(prepared.error());
    return runner_.run(m, mode, estimate(plan_.work(launch_.context.world, m, k_), rates_));
  }

  const GemmRsPlan& plan() const { return plan_; }
  std::uint32_t epoch() const { return launch_.epoch; }
  LaunchRunner& runner() { return runner_; }

 private:
  bool run_role(Role role, std::uint32_t index, BlockTotals& totals) override {
    CpuExecutor executor(*tiles_, math_, matrices_, role == Role::kCompute ? index : 0);
    GemmRsBlock<CpuExecutor> block(executor, launch_, role, index, totals);
    switch (role) {
      case Role::kCompute:
        return gemm_rs::compute(block);
      case Role::kReduce:
        return gemm_rs::reduce(block);
      case Role::kSend:
        return gemm_rs::send(block);
      case Role::kReceive:
        return gemm_rs::receive(block);
      default:
        return true;
    }
  }
  Status role_error() const override { return tiles_->error(); }

  Status check_arguments(const GemmMatrices& matrices, std::uint32_t m) const {
    MK_RETURN_IF_ERROR(check_gemm_launch("gemm_rs", matrices, m, plan_.max, k_, options_.b_layout));
    const World& world = launch_.context.world;
    const ShardRange rows = shard_of(m, world.size(), world.rank());
    if (matrices.c == nullptr && rows.count != 0) {
      return fail(ErrorCode::kInvalidArgument, "gemm_rs: c is null, but of {} rows rank {} gets {}",
                  m, world.rank(), rows.count);
    }
    return {};
  }

  const GemmRsPlan plan_;
  const std::uint32_t k_;
  const GemmCpuOptions options_;
  MachineRates rates_;
  const RowMath& math_;
  GemmMatrices matrices_;
  std::unique_ptr<TileGemm> tiles_;
  GemmRsLaunch launch_;
  LaunchRunner runner_;  ///< ends first: its threads use the rest
};

GemmRsCpu::GemmRsCpu(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
GemmRsCpu::~GemmRsCpu() = default;

Result<std::unique_ptr<GemmRsCpu>> GemmRsCpu::create(const GemmRsPlan& plan, std::uint32_t k,
                                                     const RankContext& context,
                                                     const GemmCpuOptions& options) {
  if (k < 1 || k > kSideMax)
    return fail(ErrorCode::kInvalidArgument, "gemm_rs: k = {} is not in 1 to {}", k, kSideMax);
  MK_RETURN_IF_ERROR(check_options("gemm_rs", options));
  MK_RETURN_IF_ERROR(check_context("gemm_rs", plan.nodes, plan.locals, plan.flag_count(),
                                   options.blocks.send, context));
  auto impl = std::make_unique<Impl>(plan, k, context, options);
  MK_RETURN_IF_ERROR(impl->start());
  return std::unique_ptr<GemmRsCpu>(new GemmRsCpu(std::move(impl)));
}

Result<LaunchStats> GemmRsCpu::launch(const void* a, std::uint64_t lda, const void* b,
                                      std::uint64_t ldb, void* c, std::uint64_t ldc,
                                      std::uint32_t m, Mode mode) {
  return impl_->launch(
      {static_cast<const std::uint16_t*>(a), lda, static_cast<const std::uint16_t*>(b), ldb,
       static_cast<std::uint16_t*>(c), ldc},
      m, mode);
}

const GemmRsPlan& GemmRsCpu::plan() const { return impl_->plan(); }
std::uint32_t GemmRsCpu::epoch() const { return impl_->epoch(); }
LaunchRunner& GemmRsCpu::runner() { return impl_->runner(); }

}  // namespace mk::kernels
