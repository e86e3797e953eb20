// How MoE Dispatch+GEMM deals out the groups of a GPU that stream, what its tiles are, and which
// arrival flags it looks at.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "kernels/comm/banks.h"
#include "kernels/cuda/host/operator_frame.h"
#include "kernels/ops/moe/schedule.h"
#include "kernels/ops/moe/sm90.h"

namespace mk::kernels {
namespace {

TEST(MoeGroups, EachPlansOrSharesAndBothRolesHaveSome) {
  for (const std::uint32_t ranks : {1u, 2u, 8u}) {
    for (std::uint32_t streams = 1; streams <= 300; ++streams) {
      RoleBlocks blocks;
      blocks.pull = streams;
      blocks.plan = moe_dispatch_plan_groups(streams, 1, ranks, false);
      ASSERT_GE(blocks.plan, 1u);
      ASSERT_LE(blocks.plan, std::min(streams, kBlocksMax));
      const std::uint32_t sharers = cuda::moe_sharers(blocks);
      ASSERT_GE(sharers, 1u);
      ASSERT_LE(sharers, streams);
      ASSERT_GE(blocks.plan + sharers, streams) << "a group does neither";
      if (ranks > 1 && streams > 1) {
        ASSERT_EQ(blocks.plan + sharers, streams);
      }
      if (ranks == 1 && streams <= kBlocksMax) {
        ASSERT_EQ(blocks.plan, streams);
      }
    }
  }
}

TEST(MoeGroups, AllPlanWhereCopyEnginesBringAllTokens) {
  for (std::uint32_t streams = 1; streams <= kBlocksMax; ++streams) {
    EXPECT_EQ(moe_dispatch_plan_groups(streams, 1, 4, true), streams);
    // Over nodes they also bring this rank's tokens to where the network reads them.
    EXPECT_EQ(moe_dispatch_plan_groups(streams, 2, 4, true),
              moe_dispatch_plan_groups(streams, 2, 4, false));
  }
}

TEST(MoeEngines, APlanThatTheyCannotServeIsRefusedWithTheReason) {
  const MoeDispatchShape shape{100, 64, 40, 9, 3};
  const auto made = [&](std::uint32_t nodes, std::uint32_t locals, GatherKind kind) {
    return MoeDispatchPlan::make(nodes, locals, shape, DType::kBf16, moe_dispatch_cuda_tiling(),
                                 {kind, 1, true});
  };
  for (const std::uint32_t nodes : {1u, 2u}) {
    const auto plan = made(nodes, 2, GatherKind::kBroadcast);
    ASSERT_TRUE(plan) << plan.error().message;
    EXPECT_EQ(plan->tokens.local_banks, 1u);
    EXPECT_EQ(plan->tokens.banks, nodes == 1 ? 1u : 2u);
    EXPECT_EQ(plan->routing.local_banks, 2u);
    const auto groups = MoeDispatchPlan::make(
        nodes, 2, shape, DType::kBf16, moe_dispatch_cuda_tiling(), {GatherKind::kBroadcast, 1});
    EXPECT_NE(plan->fingerprint(), groups->fingerprint());
    EXPECT_NE(made(nodes, 1, GatherKind::kBroadcast).error().message.find("alone on its node"),
              std::string::npos);
    EXPECT_NE(made(nodes, 2, GatherKind::kPull).error().message.find("a broadcast"),
              std::string::npos);
  }
}

// A few pieces, however many tokens, but none that a copy could not take.
TEST(MoeEngines, PiecesAreFewAndNotSmall) {
  for (const std::uint64_t bytes : {0ull, 1ull << 20, 100ull << 20, 1ull << 30, 1ull << 36}) {
    const std::uint64_t piece = moe_dispatch_dma_bytes(bytes);
    EXPECT_GE(piece, 8u << 20);
    EXPECT_LE(piece, 1u << 30);
    if (bytes <= 4ull << 30) {
      EXPECT_LE((bytes + piece - 1) / piece, 4u);
    }
  }
}

TEST(MoeTiling, IsTheKernels) {
  MoeDispatchShape shape;
  shape.tokens_max = 100;
  shape.hidden = 64;
  shape.features = 40;
  shape.experts = 9;
  shape.top_k = 3;
  for (const GatherKind kind : {GatherKind::kBroadcast, GatherKind::kPull}) {
    const auto plan =
        MoeDispatchPlan::make(2, 2, shape, DType::kBf16, moe_dispatch_cuda_tiling(), {kind, 2});
    ASSERT_TRUE(plan) << plan.error().message;
    EXPECT_EQ(plan->tile_m, static_cast<std::uint32_t>(cuda::kMoeTileRows));
    EXPECT_EQ(plan->tokens.kind, kind);
    EXPECT_EQ(plan->routing.kind, kind);
  }
}

TEST(MoePolledFlags, AreThoseOfBothGathersAndAllBanks) {
  const cuda::PolledFlags all(192, 2);
  EXPECT_EQ(all.count, 192u);
  EXPECT_EQ(all.bank_arrivals, 0u);
  EXPECT_EQ(all.releases_begin, 0u);
  EXPECT_EQ(all.banks, 2u);
  const FlagMap map{3, 1, 70};
  const cuda::PolledFlags one = map;
  EXPECT_EQ(one.count, map.count());
  EXPECT_EQ(one.bank_arrivals, 2u * 128);
  EXPECT_EQ(one.releases_begin, 2u * 128) << "behind the only bank's arrivals";
  EXPECT_EQ(one.banks, 1u);
}

}  // namespace
}  // namespace mk::kernels
