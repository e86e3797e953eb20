// Every shape's parts are aligned, disjoint and inside.
#include "shm/layout.h"

#include <gtest/gtest.h>

#include <vector>

namespace mk::shm {
namespace {

TEST(Layout, EveryShapesPartsAreAlignedDisjointAndInside) {
  std::size_t shapes = 0;
  for (std::uint32_t lanes = 1; lanes <= kLanesMax; ++lanes) {
    for (std::uint32_t log2 = 4; log2 <= 16; ++log2) {
      for (std::uint32_t flags = kFlagGranule; flags <= kFlagsMax;
           flags += flags < 4096 ? kFlagGranule : 61 * kFlagGranule) {
        const SegmentShape shape{lanes, log2, flags};
        ASSERT_TRUE(valid(shape));
        const SegmentLayout layout = layout_of(shape);
        SCOPED_TRACE(testing::Message()
                     << lanes << " lanes, 2^" << log2 << " slots, " << flags << " flags");
        ASSERT_GE(layout.lanes_offset, kHeaderBytes);
        ASSERT_EQ(layout.lanes_offset % alignof(LaneControl), 0u);
        ASSERT_GE(layout.slots_offset, layout.lanes_offset + lanes * sizeof(LaneControl));
        ASSERT_EQ(layout.slots_offset % 4096, 0u);
        ASSERT_GE(layout.flags_offset, layout.slots_offset + std::uint64_t{lanes} * (1ull << log2) *
                                                                 sizeof(CommandSlot));
        ASSERT_EQ(layout.flags_offset % 4096, 0u);
        ASSERT_GE(layout.segment_bytes, layout.flags_offset + flags * std::uint64_t{4});
        ASSERT_EQ(layout.segment_bytes % 4096, 0u);
        ++shapes;
      }
    }
  }
  EXPECT_GT(shapes, 10'000u);
}

TEST(Layout, EveryLanesSlotsAreAligned) {
  for (std::uint32_t log2 = 4; log2 <= 16; ++log2) {
    EXPECT_EQ((kCommandBytes << log2) % kCacheLine, 0u)
        << "lane 1's slots share a line with lane 0's";
  }
}

TEST(Layout, ShapesOutOfRangeAreInvalid) {
  EXPECT_TRUE(valid(SegmentShape{}));
  EXPECT_FALSE(valid({0, 10, 64}));
  EXPECT_FALSE(valid({kLanesMax + 1, 10, 64}));
  EXPECT_FALSE(valid({~0u, 10, 64}));
  EXPECT_FALSE(valid({1, 3, 64}));
  EXPECT_FALSE(valid({1, 17, 64}));
  EXPECT_FALSE(valid({1, 31, 64}));
  EXPECT_FALSE(valid({1, 32, 64}));
  EXPECT_FALSE(valid({1, 64, 64}));
  EXPECT_FALSE(valid({1, ~0u, 64}));
  EXPECT_FALSE(valid({1, 10, 0}));
  EXPECT_FALSE(valid({1, 10, 63}));
  EXPECT_FALSE(valid({1, 10, 65}));
  EXPECT_FALSE(valid({1, 10, kFlagsMax + kFlagGranule}));
  EXPECT_FALSE(valid({1, 10, ~0u & ~(kFlagGranule - 1)}));
}

}  // namespace
}  // namespace mk::shm
