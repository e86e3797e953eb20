// Which of the segment's words a GPU is given, and that they are let go.
#include "client/src/gpu_session.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "tests/shm/gpu/fake_driver.h"

namespace mk {
namespace {

TEST(GpuSession, GivesTheGpuTheSegmentsWordsAndTheLanesProducers) {
  auto segment = shm::Segment::create({2, 8, 64}, 1, 1, 0, 0);
  ASSERT_TRUE(segment) << segment.error().message;
  alignas(4096) static std::uint32_t abort_page[1024] = {};
  std::vector<shm::RingProducer> lanes(2);
  for (std::uint32_t lane = 0; lane < 2; ++lane) {
    lanes[lane].ring = segment->ring(lane);
    lanes[lane].produced = 7 + lane;
  }
  const auto driver =
      std::make_shared<gpu::test::FakeDriver>(std::make_shared<gpu::test::FakeMachine>());
  {
    auto session = GpuSession::create(driver, *segment, abort_page, lanes);
    ASSERT_TRUE(session) << session.error().message;
    // The fake driver's device addresses are the host's.
    EXPECT_EQ((*session)->launches(), &segment->header().launches);
    EXPECT_EQ((*session)->session_abort(), &segment->header().abort_flag);
    EXPECT_EQ((*session)->process_abort(), abort_page);
    EXPECT_EQ((*session)->flags(), segment->flags());
    for (std::uint32_t lane = 0; lane < 2; ++lane) {
      const shm::RingProducer& there = (*session)->lanes()[lane];
      EXPECT_NE(&there, &lanes[lane]);
      EXPECT_EQ(there.produced, 7 + lane);
      EXPECT_EQ(there.ring.control, segment->ring(lane).control);
      EXPECT_EQ(there.ring.slots, segment->ring(lane).slots);
    }
    EXPECT_EQ(driver->pinned(), 2u);
    EXPECT_EQ(driver->allocations(), 1u);
  }
  EXPECT_EQ(driver->pinned(), 0u);
  EXPECT_EQ(driver->allocations(), 0u);
}

}  // namespace
}  // namespace mk
