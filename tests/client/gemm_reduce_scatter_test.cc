// GEMM+ReduceScatter through libmkclient against real engines in this process.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "kernels/comm/shard.h"
#include "mkernel/gemm_reduce_scatter.h"
#include "mkernel/mkernel_c.h"
#include "tests/client/gemm_arguments.h"

namespace mk {
namespace {

using Elements = std::vector<std::uint16_t>;

class GemmReduceScatterWorld : public testing::TestWithParam<EmbeddedWorld> {};

TEST_P(GemmReduceScatterWorld, GivesEveryRankItsRowsOfTheSum) {
  expect_sums_over_ranks<GemmReduceScatter>(GetParam(), GemmReduceScatter::rows_of);
}

INSTANTIATE_TEST_SUITE_P(Worlds, GemmReduceScatterWorld, testing::ValuesIn(kEmbeddedWorlds),
                         name_of_world);

TEST(GemmReduceScatter, SaysWhichRowsARankGetsAsTheOperatorDealsThemOut) {
  for (std::uint32_t world : {1u, 2u, 3u, 7u, 32u, 1024u}) {
    for (std::uint32_t m : {1u, 2u, 31u, 32u, 33u, 4096u, 1u << 24}) {
      std::uint64_t next = 0;
      for (std::uint32_t rank = 0; rank < world; ++rank) {
        const RowRange rows = GemmReduceScatter::rows_of(m, world, rank);
        const kernels::ShardRange shard = kernels::shard_of(m, world, rank);
        ASSERT_EQ(rows.first, shard.first);
        ASSERT_EQ(rows.count, shard.count);
        ASSERT_EQ(rows.first, next);
        next += rows.count;
      }
      ASSERT_EQ(next, m);
    }
  }
}

TEST(GemmReduceScatter, WrongArgumentsChangeNothing) {
  expect_wrong_gemm_arguments_change_nothing<GemmReduceScatter>();
}

TEST(GemmReduceScatter, FollowsPitchesAndChecksThem) {
  expect_pitches_are_followed_and_checked<GemmReduceScatter>();
}

TEST(GemmReduceScatter, AppliesItsEpilogue) { expect_an_epilogue<GemmReduceScatter>(); }

TEST(GemmReduceScatter, TheEstimateChoosesTheModeUnlessToldOtherwise) {
  const auto cluster = cluster_of(1);
  for_ranks(2, [&](std::uint32_t rank) {
    auto session = Session::attach(place(*cluster, 2, rank, "auto"));
    ASSERT_TRUE(session);
    const Elements ones(64, 0x3f80);
    Elements c(64, 0xffff);
    for (const double step_ns : {1e-3, 1e12}) {
      Tuning tuning;
      // Each rank for itself: here rank 0 takes steps for cheap or dear, rank 1 always for cheap.
      tuning.rates = {1e9, 1e9, 1e9, 1, rank == 0 ? step_ns : 1e-3};
      auto op = GemmReduceScatter::create(*session, {8, 8, 8}, tuning);
      ASSERT_TRUE(op) << op.error().message;
      const auto stats = op->launch(ones.data(), ones.data(), c.data(), 8);
      ASSERT_TRUE(stats) << stats.error().message;
      EXPECT_EQ(rank == 0 && step_ns > 1 ? LaunchMode::kUnfused : LaunchMode::kFused, stats->mode);
      EXPECT_EQ(stats->mode == LaunchMode::kUnfused,
                stats->estimated_unfused_ns < stats->estimated_fused_ns);
      const auto fused = op->launch(ones.data(), ones.data(), c.data(), 8, LaunchMode::kFused);
      ASSERT_TRUE(fused) << fused.error().message;
      EXPECT_EQ(LaunchMode::kFused, fused->mode);
      EXPECT_EQ(stats->estimated_fused_ns, fused->estimated_fused_ns);
      for (std::size_t i = 0; i < 32; ++i) EXPECT_EQ(0x4180, c[i]);  // 16.0
    }
    EXPECT_TRUE(session->barrier());
  });
  auto session = Session::attach(place(*cluster, 1, 0, "rates"));
  ASSERT_TRUE(session);
  Tuning tuning;
  tuning.rates.flops_per_s = -1;
  EXPECT_EQ(ErrorCode::kInvalidArgument,
            GemmReduceScatter::create(*session, {8, 8, 8}, tuning).error().code);
}

}  // namespace
}  // namespace mk
