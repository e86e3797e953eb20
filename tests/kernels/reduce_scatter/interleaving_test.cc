// ReduceScatter's roles as a discrete-event simulation (support/gemm_simulation.h).
#include "kernels/ops/reduce_scatter/protocol.h"
#include "kernels/ops/reduce_scatter/spec.h"
#include "tests/kernels/support/gemm_simulation.h"
#include "tests/kernels/support/scattered_rows.h"

namespace mk::kernels::testing {
namespace {

struct ReduceScatter : ScatteredRows {
  using Launch = ReduceScatterLaunch;
  static constexpr const char* kName = "reduce_scatter";

  /// The rank brings what GemmSimExecutor multiplies.
  class Executor : public GemmSimExecutor {
   public:
    Executor(const SimExecutor& frame, GemmSimRank<ReduceScatter>& rank)
        : GemmSimExecutor(frame, rank.launch), launch_(rank.launch) {
      launch_.output = reinterpret_cast<std::byte*>(rank.c.data());
    }
    void* c_at(const TileRect& rect) const { return reduce_scatter::result_at(launch_, rect); }
    std::uint64_t c_stride() const { return reduce_scatter::result_stride(launch_); }

   private:
    ReduceScatterLaunch launch_;
  };

  static void begin(Launch& launch) {
    launch.reduce_parts = launch.receive_parts = SimExecutor::parts(launch);
    launch.sums_once = sums_once(launch);
  }
  static bool run_role(Executor& executor, const Launch& launch, Role role, std::uint32_t index,
                       BlockTotals& totals) {
    GemmRsBlock block(executor, launch, role, index, totals);
    return reduce_scatter::run_role(block, launch);
  }
};

INSTANTIATE_TYPED_TEST_SUITE_P(ReduceScatter, GemmInterleaving, ReduceScatter);

// Slots are there once: that their owner has ended its last launch is all that protects them.
TEST(ReduceScatterInterleaving, SlotsReusedTooEarlyAreSeen) {
  GemmSimOptions faults;
  faults.forge_ends = true;
  EXPECT_GT(wrong_of_240<ReduceScatter>(1, 3, faults), 5);
}

}  // namespace
}  // namespace mk::kernels::testing
