#include "kernels/cpu/gemm_ar_cpu.h"

#include <cstring>
#include <utility>

#include "kernels/cpu/cpu_rates.h"
#include "kernels/cpu/gemm_sum.h"
#include "kernels/gemm_ar/roles.h"

namespace mk::kernels {
namespace {

/// What kernels/gemm_ar/roles.h asks of an executor.
class CpuExecutor : public GemmSumExecutor {
 public:
  using GemmSumExecutor::GemmSumExecutor;

  bool wants_c() const { return matrices_.c != nullptr; }
  void copy_to_c(const TileRect& rect, const void* source, std::uint64_t source_stride) {
    const auto* from = static_cast<const std::uint16_t*>(source);
    std::uint16_t* to = matrices_.c_at(rect);
    for (std::uint32_t i = 0; i < rect.rows; ++i, from += source_stride, to += matrices_.ldc) {
      std::memcpy(to, from, std::size_t{rect.columns} * kElementBytes);
    }
  }
};

}  // namespace

class GemmArCpu::Impl : private RoleBody {
 public:
  Impl(const GemmArPlan& plan, std::uint32_t k, const RankContext& context,
       const GemmCpuOptions& options)
      : plan_(plan),
        k_(k),
        options_(options),
        math_(row_math(plan.dtype)),
        launch_(make_launch<GemmArLaunch>(plan, context, options.blocks, plan.banks)),
        runner_("gemm_ar", launch_, *this, options.wait_timeout) {}
  virtual ~Impl() = default;

  Status start() {
    const GemmArSchedule largest(plan_, plan_.max.m);
    // Of any launch: smaller ones may have taller tiles.
    const CpuGemm::TileShape tile{std::min(plan_.tile_m, plan_.max.m), largest.tile_cols()};
    MK_ASSIGN_OR_RETURN(tiles_, TileGemm::create(launch_.blocks.compute, tile, plan_.max.n, k_,
                                                 plan_.dtype, options_.b_layout));
    rates_ = cpu_rates(options_.rates, launch_.context.world, launch_.blocks,
                       block_flops_per_s(tiles_->path()));
    return runner_.start(gemm_sum_threads(launch_.blocks, launch_.context.world, Role::kCollect));
  }

  Result<LaunchStats> launch(const GemmMatrices& matrices, std::uint32_t m, Mode mode) {
    MK_RETURN_IF_ERROR(check_gemm_launch("gemm_ar", matrices, m, plan_.max, k_, options_.b_layout));
    MK_RETURN_IF_ERROR(runner_.ready());
    matrices_ = matrices;
    const TileGrid grid(m, plan_.max.n, plan_.tile_m, plan_.tile_n);
    const Status prepared = tiles_->prepare({&grid, 1}, {&matrices_.lda, 1}, matrices.ldb);
    if (!prepared) return runner_.broken_by(prepared.error());
    return runner_.run(m, mode, estimate(plan_.work(launch_.context.world, m, k_), rates_));
  }

  const GemmArPlan& plan() const { return plan_; }
  std::uint32_t epoch() const { return launch_.epoch; }
  const void* output() const {
    return launch_.context.workspaces[launch_.context.world.local] + plan_.layout.out;
  }
  LaunchRunner& runner() { return runner_; }

 private:
  bool run_role(Role role, std::uint32_t index, BlockTotals& totals) override {
    CpuExecutor executor(*tiles_, math_, matrices_, role == Role::kCompute ? index : 0);
    GemmArBlock block(executor, launch_, role, index, totals);
    switch (role) {
      case Role::kCompute:
        return gemm_ar::compute(block);
      case Role::kReduce:
        return gemm_ar::reduce(block);
      case Role::kSend:
        return gemm_ar::send(block);
      case Role::kReceive:
        return gemm_ar::receive(block);
      case Role::kCollect:
        return gemm_ar::collect(block);
      default:
        return true;
    }
  }
  Status role_error() const override { return tiles_->error(); }

  const GemmArPlan plan_;
  const std::uint32_t k_;
  const GemmCpuOptions options_;
  MachineRates rates_;
  const RowMath& math_;
  GemmMatrices matrices_;
  std::unique_ptr<TileGemm> tiles_;
  GemmArLaunch launch_;
  LaunchRunner runner_;  ///< ends first: its threads use the rest
};

GemmArCpu::GemmArCpu(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
GemmArCpu::~GemmArCpu() = default;

Result<std::unique_ptr<GemmArCpu>> GemmArCpu::create(const GemmArPlan& plan, std::uint32_t k,
                                                     const RankContext& context,
                                                     const GemmCpuOptions& options) {
  if (k < 1 || k > kSideMax)
    return fail(ErrorCode::kInvalidArgument, "gemm_ar: k = {} is not in 1 to {}", k, kSideMax);
  MK_RETURN_IF_ERROR(check_options("gemm_ar", options));
  MK_RETURN_IF_ERROR(check_context("gemm_ar", plan.nodes, plan.locals, plan.flag_count(),
                                   options.blocks.send, context));
  auto impl = std::make_unique<Impl>(plan, k, context, options);
  MK_RETURN_IF_ERROR(impl->start());
  return std::unique_ptr<GemmArCpu>(new GemmArCpu(std::move(impl)));
}

Result<LaunchStats> GemmArCpu::launch(const void* a, std::uint64_t lda, const void* b,
                                      std::uint64_t ldb, void* c, std::uint64_t ldc,
                                      std::uint32_t m, Mode mode) {
  return impl_->launch(
      {static_cast<const std::uint16_t*>(a), lda, static_cast<const std::uint16_t*>(b), ldb,
       static_cast<std::uint16_t*>(c), ldc},
      m, mode);
}

const void* GemmArCpu::output() const { return impl_->output(); }
const GemmArPlan& GemmArCpu::plan() const { return impl_->plan(); }
std::uint32_t GemmArCpu::epoch() const { return impl_->epoch(); }
LaunchRunner& GemmArCpu::runner() { return impl_->runner(); }

}  // namespace mk::kernels
