#include "daemon/proxy/completion_tracker.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

namespace mk::daemon {
namespace {

TEST(Cookie, CarriesEveryFieldAtItsExtremes) {
  for (const std::uint32_t slot : {0u, 1u, shm::kSessionsMax - 1}) {
    for (const std::uint32_t lane : {0u, 1u, shm::kLanesMax - 1}) {
      for (const std::uint32_t generation : {0u, 1u, Cookie::kGenerationMask}) {
        for (const std::uint32_t sequence : {0u, 1u, 0x8000'0000u, 0xffff'ffffu}) {
          const Cookie cookie{slot, generation, lane, sequence};
          EXPECT_EQ(Cookie::unpack(cookie.pack()), cookie);
        }
      }
    }
  }
}

/// Opens a command and posts it at once.
InFlight& post_one(LaneWindow& window) {
  InFlight& entry = window.open();
  entry.state = InFlight::State::kPosted;
  return entry;
}

TEST(LaneWindow, RoundsItsCapacityUpAndFillsUp) {
  LaneWindow window(5);
  EXPECT_EQ(window.capacity(), 8u);
  for (int i = 0; i < 8; ++i) {
    EXPECT_FALSE(window.full());
    post_one(window);
  }
  EXPECT_TRUE(window.full());
  EXPECT_EQ(window.complete(*window.find_posted(0)), 1u);
  EXPECT_FALSE(window.full());
}

TEST(LaneWindow, FindsOnlyWhatIsWithTheFabric) {
  LaneWindow window(8);
  EXPECT_EQ(window.find_posted(0), nullptr);
  InFlight& entry = window.open();
  EXPECT_EQ(window.find_posted(0), nullptr) << "taken, not posted";
  entry.state = InFlight::State::kPosted;
  EXPECT_EQ(window.find_posted(0), &entry);
  EXPECT_EQ(window.find_posted(1), nullptr);
  EXPECT_EQ(window.find_posted(8), nullptr) << "same place, another lap";
  EXPECT_EQ(window.find_posted(0xffff'ffff), nullptr);
  window.complete(entry);
  EXPECT_EQ(window.find_posted(0), nullptr) << "completed twice";
}

TEST(LaneWindow, EveryOrderOfFiveCompletionsCountsInRingOrder) {
  std::vector<std::uint32_t> order(5);
  std::iota(order.begin(), order.end(), 0);
  do {
    LaneWindow window(8);
    for (int i = 0; i < 5; ++i) post_one(window);
    std::vector<bool> done(5);
    std::uint32_t counted = 0;
    for (const std::uint32_t sequence : order) {
      counted += window.complete(*window.find_posted(sequence));
      done[sequence] = true;
      const auto first_open = std::find(done.begin(), done.end(), false) - done.begin();
      ASSERT_EQ(counted, static_cast<std::uint32_t>(first_open));
    }
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(LaneWindow, AGoneCommandHoldsTheCountForEver) {
  LaneWindow window(8);
  for (int i = 0; i < 3; ++i) post_one(window);
  EXPECT_EQ(window.complete(*window.find_posted(0)), 1u);
  window.find_posted(1)->state = InFlight::State::kGone;
  EXPECT_EQ(window.complete(*window.find_posted(2)), 0u);
}

TEST(LaneWindow, RandomOrderOverManyLaps) {
  std::mt19937 random(7);
  LaneWindow window(16);
  std::vector<std::uint32_t> open;
  std::uint32_t next = 0;
  std::uint32_t counted = 0;
  while (counted < 100'000) {
    if (!window.full() && random() % 3 != 0) {
      post_one(window);
      open.push_back(next++);
    } else if (!open.empty()) {
      const std::size_t pick = random() % open.size();
      counted += window.complete(*window.find_posted(open[pick]));
      open.erase(open.begin() + static_cast<std::ptrdiff_t>(pick));
      const std::uint32_t oldest =
          open.empty() ? next : *std::min_element(open.begin(), open.end());
      ASSERT_EQ(counted, oldest);
    }
  }
}

}  // namespace
}  // namespace mk::daemon
