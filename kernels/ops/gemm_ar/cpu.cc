#include "kernels/ops/gemm_ar/cpu.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "kernels/cpu/gemm_sum_runner.h"
#include "kernels/ops/gemm_ar/run_role.h"

namespace mk::kernels {
namespace {

/// What kernels/ops/gemm_ar/roles.h asks of an executor.
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

struct AllReduce {
  static constexpr const char* kName = "gemm_ar";
  using Plan = GemmArPlan;
  using Launch = GemmArLaunch;
  using Executor = CpuExecutor;
  static constexpr std::optional<Role> kAfterCompute = Role::kCollect;

  static CpuGemm::TileShape largest_tile(const Plan& plan) {
    return {std::min(plan.tile_m, plan.max.m), GemmArSchedule(plan, plan.max.m).tile_cols()};
  }
  static std::array<TileGrid, 1> grids(const Plan& plan, std::uint32_t m) {
    return {TileGrid(m, plan.max.n, plan.tile_m, plan.tile_n, plan.epilogue.column_step())};
  }
  static Status check(const World&, const GemmMatrices&, std::uint32_t) { return {}; }

  static std::uint32_t sums(const Launch& launch) {
    return launch.schedule.chunks(launch.context.world.local);
  }
  static bool sum_ready(const Launch& launch, std::uint32_t task) {
    const World& world = launch.context.world;
    const GemmArSchedule& schedule = launch.schedule;
    const std::uint32_t chunk = schedule.chunk_at(world.node, world.local, task);
    return partials_seen(launch, schedule.chunk_tiles(world.local, chunk),
                         [&](std::uint32_t source, std::uint32_t tile) {
                           return schedule.tile_ready(source, tile);
                         });
  }
  static bool run_role(Executor& executor, const Launch& launch, Role role, std::uint32_t index,
                       BlockTotals& totals) {
    GemmArBlock block(executor, launch, role, index, totals);
    return gemm_ar::run_role(block, role);
  }
};

}  // namespace

class GemmArCpu::Impl : public GemmSumRunner<AllReduce> {
 public:
  using GemmSumRunner::GemmSumRunner;
};

GemmArCpu::GemmArCpu(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
GemmArCpu::~GemmArCpu() = default;

Result<std::unique_ptr<GemmArCpu>> GemmArCpu::create(const GemmArPlan& plan, std::uint32_t k,
                                                     const RankContext& context,
                                                     const GemmCpuOptions& options) {
  MK_ASSIGN_OR_RETURN(auto impl, Impl::create<Impl>(plan, k, context, options));
  return std::unique_ptr<GemmArCpu>(new GemmArCpu(std::move(impl)));
}

Result<LaunchStats> GemmArCpu::launch(const void* a, std::uint64_t lda, const void* b,
                                      std::uint64_t ldb, void* c, std::uint64_t ldc,
                                      std::uint32_t m, Mode mode, const void* bias) {
  return impl_->launch(a, lda, b, ldb, c, ldc, m, mode, bias);
}

const void* GemmArCpu::output() const { return impl_->workspace() + impl_->plan().layout.out; }
const GemmArPlan& GemmArCpu::plan() const { return impl_->plan(); }
std::uint32_t GemmArCpu::epoch() const { return impl_->epoch(); }
LaunchRunner& GemmArCpu::runner() { return impl_->runner(); }

}  // namespace mk::kernels
