// The roles of GEMM+ReduceScatter as a discrete-event simulation (support/gemm_simulation.h).
#include "tests/kernels/support/gemm_simulation.h"
#include "tests/kernels/support/scattered_rows.h"

namespace mk::kernels::testing {
namespace {

struct GemmRs : ScatteredRows {
  using Launch = GemmRsLaunch;
  static constexpr const char* kName = "gemm_rs";

  class Executor : public GemmSimExecutor {
   public:
    Executor(const SimExecutor& frame, GemmSimRank<GemmRs>& rank)
        : GemmSimExecutor(frame, rank.launch), rank_(rank) {}

    void* c_at(const TileRect& rect) const {
      return rank_.c.data() + rect.row * c_stride() + rect.column;
    }
    std::uint64_t c_stride() const { return rank_.launch.plan.max.n; }

   private:
    GemmSimRank<GemmRs>& rank_;
  };

  /// Who sums its own tiles as it computes them, and who its shard once: some ranks, in some
  /// launches.
  static void begin(Launch& launch) {
    const std::uint32_t rank = launch.context.world.rank();
    launch.accumulates_own = (launch.epoch * 7 + rank * 5 + launch.m) % 3 != 0;
    launch.sums_once = sums_once(launch);
  }
  static bool run_role(Executor& executor, const Launch& launch, Role role, std::uint32_t index,
                       BlockTotals& totals) {
    GemmRsBlock block(executor, launch, role, index, totals);
    return gemm_rs::run_role(block, role, SimExecutor::parts(launch));
  }
};

INSTANTIATE_TYPED_TEST_SUITE_P(ReduceScatter, GemmInterleaving, GemmRs);

// Slots are there once: that their owner has ended its last launch is all that protects them.
TEST(GemmRsInterleaving, SlotsReusedTooEarlyAreSeen) {
  GemmSimOptions faults;
  faults.forge_ends = true;
  for (const bool device : {false, true}) {
    faults.device_blocks = device;
    EXPECT_GT(wrong_of_240<GemmRs>(1, 3, faults), 5);
  }
}

// A rank that sums its own tiles must wait for the other's partial of each, whatever it did with it
// in the launch before.
TEST(GemmRsInterleaving, TwoRanksThatSumTheirOwnTilesNeitherHangNorMissAPartial) {
  for (std::uint64_t seed = 1; seed <= 280; ++seed) {
    GemmSimOptions options = small_gemm(1, 2, seed);
    options.max = {static_cast<std::uint32_t>(2 * (1 + seed % 7) + seed % 3), 24, 0};
    options.launches = random_sim_launches(6, options.max.m, seed);
    options.blocks.compute = 1 + seed % 4;
    options.device_blocks = seed % 2 != 0;
    ASSERT_EQ(GemmSimulation<GemmRs>(options).run(), "") << "seed " << seed;
  }
}

}  // namespace
}  // namespace mk::kernels::testing
