// Copy engines of Ring Attention: which plans they can serve, and the steps of a launch.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kernels/ops/ring/engine_steps.h"
#include "kernels/ops/ring/spec.h"

namespace mk::kernels {
namespace {

/// The steps of engines, in order.
struct Recorder {
  struct Bytes {
    std::uint64_t begin, end;
  };
  std::vector<std::vector<Bytes>> copied;
  std::vector<std::vector<ChunkRange>> shown;
  std::uint32_t chunk_bytes;
  std::uint64_t last;

  Status copy(std::uint32_t turn, std::uint64_t begin, std::uint64_t end) {
    const std::uint64_t before = copied[turn].empty() ? 0 : copied[turn].back().end;
    EXPECT_EQ(begin, before);
    copied[turn].push_back({begin, end});
    return {};
  }
  Status show(std::uint32_t turn, ChunkRange chunks) {
    EXPECT_EQ(chunks.begin, shown[turn].empty() ? 1 : shown[turn].back().end);
    EXPECT_LT(chunks.begin, chunks.end);
    shown[turn].push_back(chunks);
    // All whole chunks so far, and none that is not.
    const std::uint64_t bytes = copied[turn].back().end;
    EXPECT_TRUE((chunks.end - 1) * std::uint64_t{chunk_bytes} <= bytes || bytes == last);
    EXPECT_GT(chunks.end * std::uint64_t{chunk_bytes}, bytes);
    return {};
  }
};

// To each of the node's others: every byte once, in order, and each chunk once, when its bytes are
// there.
TEST(RingEngines, EveryByteIsBroughtAndEveryChunkShownOnce) {
  for (const std::uint32_t locals : {2u, 3u, 8u}) {
    for (const std::uint32_t together : {1u, 2u, 4u}) {
      for (const std::uint32_t chunk_bytes : {128u, 4096u, 100000u}) {
        RingAttentionShape shape{301, 8, 4, 64, true};
        shape.batch = 2;
        RingAttentionTiling tiling;
        tiling.packing = KeyPacking::kHeads;
        tiling.engines = true;
        tiling.heads_together = together;
        tiling.chunk_bytes = chunk_bytes;
        const auto plan = RingAttentionPlan::make(1, locals, shape, tiling);
        ASSERT_TRUE(plan) << plan.error().message;
        EXPECT_EQ(plan->banks, 1u);
        const GatherSchedule gather(plan->gather, World{1, locals, 0, 0});
        for (const std::uint32_t rows : {1u, 7u, 301u / locals}) {
          const std::uint64_t bytes = gather.data_bytes(plan->gathered_rows(rows));
          Recorder record{std::vector<std::vector<Recorder::Bytes>>(locals),
                          std::vector<std::vector<ChunkRange>>(locals), plan->gather.chunk_bytes,
                          bytes};
          ASSERT_TRUE(ring_attention::bring_keys(*plan, gather, rows, record));
          for (std::uint32_t turn = 1; turn < locals; ++turn) {
            ASSERT_EQ(record.copied[turn].size(), 2u * 8 / together);
            ASSERT_EQ(record.copied[turn].back().end, bytes);
            ASSERT_EQ(record.shown[turn].back().end, gather.chunks(plan->gathered_rows(rows)));
          }
        }
      }
    }
  }
}

TEST(RingEngines, APlanThatTheyCannotServeIsRefusedWithTheReason) {
  const auto message = [](std::uint32_t nodes, std::uint32_t locals, RingAttentionShape shape,
                          std::uint32_t together) -> std::string {
    RingAttentionTiling tiling = ring_attention_cuda_tiling(shape);
    tiling.engines = true;
    tiling.heads_together = together;
    const auto plan = RingAttentionPlan::make(nodes, locals, shape, tiling);
    return plan ? "" : plan.error().message;
  };
  const RingAttentionShape shape{4096, 16, 4, 128, true};
  EXPECT_EQ(message(1, 2, shape, 0), "");
  EXPECT_NE(message(1, 1, shape, 1).find("alone on its node"), std::string::npos);
  EXPECT_NE(message(2, 2, shape, 1).find("for the network"), std::string::npos);
  EXPECT_NE(message(1, 2, shape, 3).find("power of two"), std::string::npos);
  EXPECT_NE(message(1, 2, shape, 8).find("divides the key heads"), std::string::npos);
  RingAttentionShape packed = shape;
  packed.sequences_max = 4;
  EXPECT_NE(message(1, 2, packed, 1).find("packed sequences"), std::string::npos);
  RingAttentionShape large{192 * 1024, 16, 16, 128, false};
  large.batch = 16;
  EXPECT_NE(message(1, 4, large, 1).find("fit into the workspace"), std::string::npos);
  RingAttentionTiling groups = ring_attention_cuda_tiling(shape);
  groups.heads_together = 2;
  EXPECT_FALSE(RingAttentionPlan::make(1, 2, shape, groups));
}

}  // namespace
}  // namespace mk::kernels
