// Copy engines of Ring Attention: which plans they can serve.
#include <gtest/gtest.h>

#include <string>

#include "kernels/ops/ring/spec.h"

namespace mk::kernels {
namespace {

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
