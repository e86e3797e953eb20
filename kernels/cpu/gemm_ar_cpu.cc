#include "kernels/cpu/gemm_ar_cpu.h"

#include <cstring>
#include <utility>
#include <vector>

#include "kernels/cpu/cpu_rates.h"
#include "kernels/cpu/pacer.h"
#include "kernels/cpu/row_math.h"
#include "kernels/cpu/sum_rows.h"
#include "kernels/cpu/tile_gemm.h"
#include "kernels/gemm_ar/roles.h"

namespace mk::kernels {
namespace {

/// The caller's matrices of one launch.
struct Matrices {
  const std::uint16_t* a = nullptr;
  std::uint64_t lda = 0;
  const std::uint16_t* b = nullptr;
  std::uint64_t ldb = 0;
  std::uint16_t* c = nullptr;
  std::uint64_t ldc = 0;
};

/// What kernels/gemm_ar/roles.h asks of an executor, for one block on one thread. Stores and loads
/// are this thread's own plain ones, so flags order them without further ado.
class CpuExecutor : public CpuPacer {
 public:
  CpuExecutor(TileGemm& tiles, const RowMath& math, const Matrices& matrices,
              std::uint32_t compute_block)
      : tiles_(tiles), math_(math), matrices_(matrices), block_(compute_block) {}

  bool multiply(const TileRect& rect, void* target, std::uint64_t target_stride) {
    return tiles_.multiply(block_, {rect.rows, rect.columns},
                           matrices_.a + rect.row * matrices_.lda, matrices_.lda, matrices_.b,
                           rect.column, target, target_stride);
  }
  void sum(const SumJob& job) { sum_rows(math_, job); }
  bool wants_c() const { return matrices_.c != nullptr; }
  void copy_to_c(const TileRect& rect, const void* source, std::uint64_t source_stride) {
    const auto* from = static_cast<const std::uint16_t*>(source);
    std::uint16_t* to = matrices_.c + rect.row * matrices_.ldc + rect.column;
    for (std::uint32_t i = 0; i < rect.rows; ++i, from += source_stride, to += matrices_.ldc) {
      std::memcpy(to, from, std::size_t{rect.columns} * kElementBytes);
    }
  }
  void stores_done() {}
  void loads_begin() {}

 private:
  TileGemm& tiles_;
  const RowMath& math_;
  const Matrices& matrices_;
  std::uint32_t block_;
};

std::vector<RoleThread> threads_of(const RoleBlocks& blocks, const World& world) {
  std::vector<RoleThread> threads;
  add_role(threads, Role::kCompute, blocks.compute, Role::kCollect);
  if (world.locals > 1) add_role(threads, Role::kReduce, blocks.reduce);
  if (world.nodes > 1) add_role(threads, Role::kSend, blocks.send);
  if (world.nodes > 1) add_role(threads, Role::kReceive, blocks.receive);
  return threads;
}

GemmArLaunch make_launch(const GemmArPlan& plan, const RankContext& context,
                         const RoleBlocks& blocks) {
  GemmArLaunch launch;
  launch.plan = plan;
  launch.context = context;
  launch.blocks = blocks;
  launch.banks = plan.banks;
  return launch;
}

}  // namespace

class GemmArCpu::Impl : private RoleBody {
 public:
  Impl(const GemmArPlan& plan, std::uint32_t k, const RankContext& context,
       const GemmCpuOptions& options)
      : plan_(plan),
        k_(k),
        options_(options),
        math_(row_math(plan.dtype)),
        launch_(make_launch(plan, context, options.blocks)),
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
    return runner_.start(threads_of(launch_.blocks, launch_.context.world));
  }

  Result<LaunchStats> launch(const Matrices& matrices, std::uint32_t m, Mode mode) {
    MK_RETURN_IF_ERROR(check_arguments(matrices, m));
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

  Status check_arguments(const Matrices& matrices, std::uint32_t m) const {
    const std::uint32_t n = plan_.max.n;
    if (m < 1 || m > plan_.max.m) {
      return fail(ErrorCode::kInvalidArgument,
                  "gemm_ar: m = {} is not in 1 to {}, which the operator was made for", m,
                  plan_.max.m);
    }
    if (matrices.a == nullptr || matrices.b == nullptr) {
      return fail(ErrorCode::kInvalidArgument, "gemm_ar: {} is null",
                  matrices.a == nullptr ? "a" : "b");
    }
    const std::uint32_t b_side = options_.b_layout == BLayout::kKN ? n : k_;
    if (matrices.lda < k_ || matrices.ldb < b_side || (matrices.c != nullptr && matrices.ldc < n)) {
      return fail(ErrorCode::kInvalidArgument,
                  "gemm_ar: leading dimensions a {}, b {}, c {} are too small; at least {}, {}, {}",
                  matrices.lda, matrices.ldb, matrices.ldc, k_, b_side, n);
    }
    return {};
  }

  const GemmArPlan plan_;
  const std::uint32_t k_;
  const GemmCpuOptions options_;
  MachineRates rates_;
  const RowMath& math_;
  Matrices matrices_;
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
