#include "kernels/cpu/collective.h"
#include "kernels/cpu/finish_row.h"
#include "kernels/cpu/gemm_sum.h"
#include "kernels/cpu/pacer.h"
#include "kernels/cpu/sum_rows.h"
#include "kernels/ops/reduce_scatter/protocol.h"
#include "kernels/ops/reduce_scatter/spec.h"

namespace mk::kernels {
namespace {

struct ReduceScatter {
  static constexpr const char* kName = "reduce_scatter";
  using Plan = ReduceScatterPlan;
  using Launch = ReduceScatterLaunch;

  /// Stores and loads are this thread's own plain ones, so flags order them without further ado.
  class Executor : public CpuPacer {
   public:
    explicit Executor(const Launch& launch) : launch_(launch), math_(row_math(launch.plan.dtype)) {}

    /// The rank's rows of the tile, in the type of partials, or of one rank alone as they are.
    bool multiply(const TileRect& rect, void* target, std::uint64_t target_stride) const {
      const std::uint64_t n = launch_.plan.max.n;
      const bool widens = launch_.dtype != DType::kF32 && launch_.context.world.size() > 1 &&
                          launch_.plan.partials == Partials::kF32;
      const std::uint64_t element = bytes_of(launch_.dtype);
      // One rank alone stores results at once, with their stride.
      const std::uint64_t step = launch_.context.world.size() == 1
                                     ? target_stride * kElementBytes
                                     : target_stride * bytes_of(launch_.plan.partials);
      for (std::uint32_t row = 0; row < rect.rows; ++row) {
        const std::byte* const from =
            launch_.input + ((rect.row + row) * n + rect.column) * element;
        std::byte* const to = static_cast<std::byte*>(target) + row * step;
        if (widens) {
          math_.widen(reinterpret_cast<const std::uint16_t*>(from), reinterpret_cast<float*>(to),
                      rect.columns);
        } else {
          std::memcpy(to, from, rect.columns * element);
        }
      }
      return true;
    }
    void sum(SumJob job) const {
      reduce_scatter::settle_types(launch_, job);
      sum_rows(math_, job);
    }
    void* c_at(const TileRect& rect) const { return reduce_scatter::result_at(launch_, rect); }
    std::uint64_t c_stride() const { return reduce_scatter::result_stride(launch_); }
    void stores_done() {}
    void loads_begin() {}

   private:
    const Launch& launch_;
    const RowMath& math_;
  };

  static std::vector<RoleThread> threads(const RoleBlocks& blocks, const World& world) {
    return gemm_sum_threads(blocks, world, std::nullopt);
  }
  static bool run_role(Executor& executor, const Launch& launch, Role role, std::uint32_t index,
                       BlockTotals& totals) {
    GemmRsBlock<Executor> block(executor, launch, role, index, totals);
    return reduce_scatter::run_role(block, launch);
  }
};

}  // namespace

Result<std::unique_ptr<CollectiveCpu>> make_reduce_scatter_cpu(const ReduceScatterPlan& plan,
                                                               const RankContext& context,
                                                               const CpuOptions& options) {
  return CollectiveRunner<ReduceScatter>::create(plan, context, options);
}

}  // namespace mk::kernels
