// AllGather on the CPU executor: every rank has every rank's rows.
#include <gtest/gtest.h>

#include "kernels/ops/all_gather/spec.h"
#include "tests/kernels/support/collective_tests.h"

namespace mk::kernels::testing {
namespace {

struct AllGather {
  using Plan = AllGatherPlan;
  static constexpr std::string_view kTold = "all_gather";
  static std::uint32_t told_size(const Plan& plan) { return plan.gather.row_bytes; }
  static Result<Plan> plan(const CollectiveOptions& of) {
    return Plan::make(of.nodes, of.locals, of.m_max, of.n, of.dtype, of.tiling);
  }
  static auto make(const Plan& plan, const RankContext& context, const CpuOptions& options) {
    return make_all_gather_cpu(plan, context, options);
  }
  static Bytes input(const CollectiveOptions& of, std::uint32_t rank,
                     const CollectiveLaunch& launch) {
    return drawn_rows(of, rank, launch, of.rows_of(rank, launch.m));
  }
  static std::uint64_t output_bytes(const CollectiveOptions& of, std::uint32_t, std::uint32_t m) {
    return m * of.row_bytes();
  }
  /// Each shard of the rail but the next node's, with its header.
  static std::uint64_t network_bytes(const Plan& plan, const World& world, std::uint32_t m) {
    std::uint64_t bytes = 0;
    for (std::uint32_t node = 0; node < world.nodes; ++node) {
      if (node == (world.node + 1) % world.nodes) continue;
      const std::uint32_t rows = shard_of(m, world.size(), world.rail_peer(node)).count;
      bytes += 64 + std::uint64_t{rows} * plan.n * bytes_of(plan.dtype);
    }
    return world.nodes == 1 ? 0 : bytes;
  }
  static std::string check(const CollectiveOptions& of, const CollectiveLaunch& launch,
                           const std::vector<Bytes>& outputs, double*) {
    Bytes all;
    for (std::uint32_t rank = 0; rank < of.world(); ++rank) {
      const Bytes rows = input(of, rank, launch);
      all.insert(all.end(), rows.begin(), rows.end());
    }
    for (std::uint32_t rank = 0; rank < of.world(); ++rank) {
      const auto at =
          std::mismatch(all.begin(), all.end(), outputs[rank].begin(), outputs[rank].end());
      if (at.first != all.end() || at.second != outputs[rank].end())
        return fmt::format("rank {}: byte {} is wrong", rank, at.first - all.begin());
    }
    return {};
  }
};

INSTANTIATE_TYPED_TEST_SUITE_P(AllGather, Collective, AllGather);
INSTANTIATE_TYPED_TEST_SUITE_P(AllGather, CollectiveFailure, AllGather);

// What rows in place are for: no copy of them is made for the network.
TEST(AllGatherCpu, RowsInPlaceAreNotCopied) {
  CollectiveJob<AllGather> job(collective_options(2, 1));
  NetworkThread network(job.cluster(), 7);
  // Of rank 0: where launches 1, 3, ... put rows that lie elsewhere.
  const GatherSchedule schedule(job.plan().gather, {2, 1, 0, 0});
  auto* const input = static_cast<std::byte*>(job.op(0).input());
  std::byte* const copy = input + schedule.rows_at(1, 0) - schedule.own_rows_in_place();
  const std::size_t bytes = 20 * job.options().row_bytes();
  std::fill(copy, copy + bytes, std::byte{0xee});
  const auto untouched = [&] {
    return static_cast<std::size_t>(std::count(copy, copy + bytes, std::byte{0xee}));
  };
  const auto run = [&](bool in_place, std::uint32_t launches) {
    const std::vector<CollectiveLaunch> plans(launches, {40, Mode::kFused, 0, in_place});
    for (const auto& results : job.run(plans)) ASSERT_EQ(job.check(plans[0], results), "");
  };
  run(true, 6);
  EXPECT_EQ(untouched(), bytes);
  run(false, 1);
  EXPECT_LT(untouched(), bytes / 4) << "that is where they go";
  EXPECT_EQ(network.stop().complaint(), "");
}

TEST(AllGatherCpu, RowsInTheWorkspaceButNotWhereInputSaysAreRefused) {
  CollectiveJob<AllGather> job(collective_options(1, 2));
  Bytes some(4000);
  auto* const input = static_cast<std::byte*>(job.op(0).input());
  ASSERT_NE(input, nullptr);
  for (const std::ptrdiff_t away : {16, -64}) {
    expect_refused(job.op(0).launch(input + away, some.data(), 40, Mode::kFused),
                   "only begin at input()");
  }
  // One rank alone reads its rows where they lie: there is no such place.
  EXPECT_EQ(CollectiveJob<AllGather>(collective_options(1, 1)).op(0).input(), nullptr);
}

}  // namespace
}  // namespace mk::kernels::testing
