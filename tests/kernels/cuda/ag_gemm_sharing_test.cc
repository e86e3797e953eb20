// How AllGather+GEMM on a GPU hands its rows out: in which order, and how much at a time. Host
// arithmetic: it needs no GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>

#include "kernels/ops/ag_gemm/sm90.h"

namespace mk::kernels {
namespace {

/// Copy engines show rows of tiles of one node, and commands' payloads over several.
Tiling engines_tiling(std::uint32_t nodes, const Shape& max) {
  const std::uint32_t row = 128 * max.k * kElementBytes;
  return {128, 256, nodes > 1 ? 1u << 19 : std::clamp(row, 1u << 17, 8u << 20), 1, 1};
}

// In so many pieces p of a rank's rows that the pieces' own 6.6 µs each, (L - 1) p of them, and an
// L p-th of the product, after the last one, are least together; of whole chunks.
TEST(Tilings, DmaEnginesBringAsMuchAtATimeAsTheProductLeavesTimeFor) {
  struct Piece {
    std::uint32_t locals;
    Shape max;
    std::uint32_t pieces;
  };
  for (const Piece& one : {Piece{2, {16384, 2048, 16384}, 11}, Piece{4, {16384, 2048, 16384}, 4},
                           Piece{8, {16384, 2048, 16384}, 2}, Piece{2, {8192, 1024, 8192}, 3},
                           Piece{4, {8192, 1024, 8192}, 1}, Piece{8, {16384, 7168, 8192}, 2},
                           Piece{2, {4096, 2048, 4096}, 2}, Piece{2, {32768, 7168, 8192}, 19}}) {
    SCOPED_TRACE(testing::Message() << one.locals << " ranks, " << one.max.m << " rows");
    const auto plan =
        AgGemmPlan::make(1, one.locals, one.max, DType::kBf16, engines_tiling(1, one.max));
    ASSERT_TRUE(plan) << plan.error().message;
    const double product = 2.0 * one.max.m * one.max.n * one.max.k / 665.6e6;  // us
    const std::uint32_t bytes = ag_gemm_dma_bytes(*plan, product);
    const std::uint32_t shard = one.max.m / one.locals * one.max.k * kElementBytes;
    EXPECT_EQ(bytes % plan->gather.chunk_bytes, 0u);
    EXPECT_EQ(div_up(shard, bytes), one.pieces);
    // Not one more, and not one less, would be quicker by more than whole chunks make of it.
    const auto beside = [&](double pieces) {
      return (one.locals - 1) * pieces * 6.6 + product / (one.locals * pieces);
    };
    EXPECT_LE(beside(one.pieces), 1.1 * beside(one.pieces + 1.0));
    if (one.pieces > 1) {
      EXPECT_LE(beside(one.pieces), 1.1 * beside(one.pieces - 1.0));
    }
  }
  // Over nodes whole shards, as others come last.
  const Shape narrow{16384, 2048, 16384};
  const auto over_nodes = AgGemmPlan::make(2, 4, narrow, DType::kBf16, engines_tiling(2, narrow));
  ASSERT_TRUE(over_nodes) << over_nodes.error().message;
  EXPECT_EQ(ag_gemm_dma_bytes(*over_nodes, 1000), 64u << 20);
  // A shard of 64 GiB, which is not copied at once.
  const auto large =
      AgGemmPlan::make(1, 8, {1 << 19, 8, 1 << 19}, DType::kBf16, Tiling{128, 256, 1 << 29, 1, 1});
  ASSERT_TRUE(large) << large.error().message;
  EXPECT_EQ(ag_gemm_dma_bytes(*large, 1000), 1u << 30);
  // Nor is a quarter of one of 16 GiB passed on at once.
  const auto far =
      AgGemmPlan::make(2, 2, {1 << 17, 8, 1 << 18}, DType::kBf16, Tiling{128, 256, 1 << 28, 1, 1});
  ASSERT_TRUE(far) << far.error().message;
  RoleBlocks blocks;
  blocks.receive = 1;
  const GatherSchedule schedule(far->gather, {2, 2, 0, 0});
  EXPECT_EQ(ag_gemm_passing_on(schedule, blocks, 1 << 17, true).dma_chunks, 4u);
}

// Over nodes the first rows come long before the last, however large their chunks are: what is on
// its way at one time, a part for each group, is a few rows of tiles at most. Within a node, where
// chunks are small, as they are. The network gets the first two dozen chunks first.
TEST(Tilings, RowsAreHandedOutInTheOrderInWhichTheyAreNeeded) {
  RoleBlocks blocks;
  blocks.share = 49;
  blocks.receive = 24;
  for (const std::uint32_t m : {2048u, 4096u, 8192u, 16384u, 32768u}) {
    for (const std::uint32_t locals : {2u, 4u, 8u}) {
      SCOPED_TRACE(testing::Message() << m << " rows, " << locals << " ranks in each of two nodes");
      const Shape max{m, m / 8, m};
      const std::uint32_t chunk =
          m / (2 * locals) * m * kElementBytes >= 32u << 20 ? 1u << 19 : 1u << 18;
      const auto plan =
          AgGemmPlan::make(2, locals, max, DType::kBf16, Tiling{128, 128, chunk, 0, 0});
      ASSERT_TRUE(plan) << plan.error().message;
      const GatherSchedule schedule(plan->gather, {2, locals, 0, 0});
      const std::uint32_t rows = m / (2 * locals);
      const std::uint32_t chunks = schedule.chunks(rows);
      const gather::Sharing sharing = ag_gemm_sharing(schedule, blocks, rows, false);
      const std::uint32_t of_chunk = plan->gather.chunk_bytes / sharing.parts;
      const std::uint32_t most = (locals == 2 ? 256 : 64) * 1024;
      EXPECT_LE(of_chunk, most);
      EXPECT_EQ(sharing.network_first, std::min(chunks, 24u));
      EXPECT_EQ(sharing.taken, chunks > 128) << "of few chunks each group has a few from the start";
      const gather::PassingOn onward = ag_gemm_passing_on(schedule, blocks, m, false);
      EXPECT_LE(plan->gather.chunk_bytes / onward.parts, most);
      EXPECT_EQ(onward.taken, sharing.taken);
      EXPECT_EQ(onward.dma_chunks, 0u);
      // A header, and four pieces.
      EXPECT_EQ(ag_gemm_passing_on(schedule, blocks, m, true).dma_chunks, div_up(chunks - 1, 4));
    }
  }
  // Within one node in their order; where DMA engines bring them, groups have nothing to do.
  const Shape max{16384, 2048, 16384};
  const auto plan = AgGemmPlan::make(1, 8, max, DType::kBf16, Tiling{128, 256, 1u << 17, 0, 0});
  ASSERT_TRUE(plan) << plan.error().message;
  const GatherSchedule schedule(plan->gather, {1, 8, 0, 0});
  const gather::Sharing sharing = ag_gemm_sharing(schedule, blocks, 2048, false);
  EXPECT_EQ(sharing.parts, 1u);
  EXPECT_EQ(sharing.network_first, 0u) << "there is no network";
  EXPECT_FALSE(sharing.taken);
  EXPECT_FALSE(sharing.by_dma);
  EXPECT_TRUE(ag_gemm_sharing(schedule, blocks, 2048, true).by_dma);
}

// The caller gets few large chunks by all blocks, many by one block each.
TEST(Tilings, BlocksShareInChunksOnTheirWayToTheCaller) {
  RoleBlocks blocks;
  blocks.compute = 120;
  for (const std::uint32_t locals : {2u, 4u, 8u}) {
    for (const std::uint32_t m : {1024u, 4096u, 65536u}) {
      SCOPED_TRACE(testing::Message() << m << " rows, " << locals << " ranks");
      const auto plan = AgGemmPlan::make(1, locals, Shape{m, 8, 8192}, DType::kBf16,
                                         Tiling{128, 128, 1u << 21, 0, 0});
      ASSERT_TRUE(plan) << plan.error().message;
      const GatherSchedule schedule(plan->gather, {1, locals, 0, 0});
      const std::uint32_t parts = ag_gemm_collect_parts(schedule, blocks, m);
      const std::uint32_t chunks = locals * (schedule.chunks(m / locals) - 1);
      EXPECT_LE(plan->gather.chunk_bytes / parts, 1u << 21);
      EXPECT_GE(plan->gather.chunk_bytes / parts, 48u << 10);
      if (chunks <= 8) {
        EXPECT_GE(chunks * parts, 2 * blocks.compute);
      }
      if (m == 65536) {
        EXPECT_EQ(parts, 1u);
      }
    }
  }
}

}  // namespace
}  // namespace mk::kernels
