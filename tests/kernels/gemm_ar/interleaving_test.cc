// The roles of GEMM+AllReduce as a discrete-event simulation (support/gemm_simulation.h).
#include <algorithm>
#include <optional>

#include "kernels/ops/gemm_ar/run_role.h"
#include "kernels/ops/gemm_ar/spec.h"
#include "tests/kernels/support/gemm_simulation.h"
#include "tests/kernels/support/two_shot_plan.h"

namespace mk::kernels::testing {
namespace {

/// `kNodes`: what the plan's form needs.
template <class PlanType, std::uint32_t kNodes>
struct GemmAr {
  using Plan = PlanType;
  using Launch = GemmArLaunch;
  using Schedule = GemmArSchedule;
  using Compute = GemmArCompute;
  template <class Executor>
  using Block = GemmArBlock<Executor>;
  static constexpr const char* kName = "gemm_ar";
  static constexpr std::uint32_t kRowsMax = 9;
  static constexpr std::uint32_t kNodesLeast = kNodes;
  static constexpr bool kReuseIsSafe = kNodes > 1;
  static constexpr std::optional<Role> kThen = Role::kCollect;

  class Executor : public GemmSimExecutor {
   public:
    Executor(const SimExecutor& frame, GemmSimRank<GemmAr>& rank)
        : GemmSimExecutor(frame, rank.launch), rank_(rank) {}

    bool wants_c() const { return true; }
    void copy_to_c(const TileRect& rect, const void* source, std::uint64_t stride) {
      const std::uint32_t n = rank_.launch.plan.max.n;
      for (std::uint32_t i = 0; i < rect.rows; ++i) {
        const auto* row = static_cast<const std::uint16_t*>(source) + i * stride;
        std::copy(row, row + rect.columns, &rank_.c[std::size_t{rect.row + i} * n + rect.column]);
      }
    }

   private:
    GemmSimRank<GemmAr>& rank_;
  };

  static ShardRange rows(const Launch& launch) { return {0, launch.m}; }
  /// Who sums its own tiles as it computes them: some ranks, in some launches.
  static void begin(Launch& launch) {
    const std::uint32_t rank = launch.context.world.rank();
    launch.accumulates_own = (launch.epoch * 7 + rank * 5 + launch.m) % 3 != 0;
    auto* out = reinterpret_cast<std::uint16_t*>(
        launch.context.workspaces[launch.context.world.local] + launch.plan.layout.out);
    std::fill(out, out + std::size_t{launch.plan.max.m} * launch.plan.max.n, std::uint16_t{0x7fff});
  }
  static bool run_role(Executor& executor, const Launch& launch, Role role, std::uint32_t index,
                       BlockTotals& totals) {
    GemmArBlock block(executor, launch, role, index, totals);
    return gemm_ar::run_role(block, role, SimExecutor::parts(launch));
  }
};

using Forms =
    ::testing::Types<GemmAr<GemmArPlan, 1>, GemmAr<TwoShotPlan, TwoShotPlan::kNodesLeast>>;
// Headers are all that a node without a tile reads, and nothing but the release keeps them.
TEST(TwoShotInterleaving, AHeaderOverwrittenTooEarlyIsSeen) {
  using Op = GemmAr<TwoShotPlan, TwoShotPlan::kNodesLeast>;
  int seen = 0;
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    GemmSimOptions options = small_gemm(4, 1, seed);
    options.max = {2, 8, 0};
    options.launches = random_sim_launches(8, 2, seed);
    options.tiling.banks = 1;
    options.forge_releases = true;
    options.network.keep_forged_flags = true;
    seen += !GemmSimulation<Op>(options).run().empty();
    options.forge_releases = false;
    ASSERT_EQ(GemmSimulation<Op>(options).run(), "") << "seed " << seed;
  }
  EXPECT_GT(seen, 5);
}

INSTANTIATE_TYPED_TEST_SUITE_P(AllReduce, GemmInterleaving, Forms);

}  // namespace
}  // namespace mk::kernels::testing
