// ReduceScatter's roles as a discrete-event simulation (support/gemm_simulation.h).
#include <optional>

#include "kernels/ops/reduce_scatter/protocol.h"
#include "kernels/ops/reduce_scatter/spec.h"
#include "tests/kernels/support/gemm_simulation.h"

namespace mk::kernels::testing {
namespace {

struct ReduceScatter {
  using Plan = GemmRsPlan;
  using Launch = ReduceScatterLaunch;
  using Schedule = GemmRsSchedule;
  using Compute = GemmRsCompute;
  template <class Executor>
  using Block = GemmRsBlock<Executor>;
  static constexpr const char* kName = "reduce_scatter";
  static constexpr std::uint32_t kRowsMax = 40;  // shards of 0, 1 and several rows
  static constexpr std::optional<Role> kThen = std::nullopt;

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

  static ShardRange rows(const Launch& launch) {
    const World& world = launch.context.world;
    return shard_of(launch.m, world.size(), world.rank());
  }
  /// Some ranks sum their shard once, in some launches.
  static void begin(Launch& launch) {
    const std::uint32_t rank = launch.context.world.rank();
    launch.sums_once = (launch.epoch * 5 + rank * 11 + launch.m) % 3 != 0;
  }
  static bool run_role(Executor& executor, const Launch& launch, Role role, std::uint32_t index,
                       BlockTotals& totals) {
    GemmRsBlock block(executor, launch, role, index, totals);
    return reduce_scatter::run_role(block, SimExecutor::parts(launch));
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
