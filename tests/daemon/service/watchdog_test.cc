// The watchdog is fed only while everybody moves.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "daemon/service/watchdog.h"

namespace mk::daemon {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

std::vector<Progress> at(std::uint64_t a, std::uint64_t b) { return {{"a", a}, {"b", b}}; }

TEST(Watchdog, FirstLooksThenWantsEverybodyToMove) {
  Watchdog watchdog;
  EXPECT_TRUE(watchdog.all_moved(at(0, 0)));
  EXPECT_TRUE(watchdog.all_moved(at(1, 9)));
  EXPECT_TRUE(watchdog.all_moved(at(2, 10)));
  EXPECT_THAT(watchdog.stalled(), IsEmpty());
}

TEST(Watchdog, NamesWhoStands) {
  Watchdog watchdog;
  watchdog.all_moved(at(5, 5));
  EXPECT_FALSE(watchdog.all_moved(at(6, 5)));
  EXPECT_THAT(watchdog.stalled(), ElementsAre("b"));
  EXPECT_FALSE(watchdog.all_moved(at(7, 5)));
}

TEST(Watchdog, ASlowOneCostsALateFeedOnly) {
  Watchdog watchdog;
  watchdog.all_moved(at(1, 1));
  EXPECT_FALSE(watchdog.all_moved(at(2, 1)));
  // a has stood since, but has moved since the last feed.
  EXPECT_TRUE(watchdog.all_moved(at(2, 2)));
  EXPECT_FALSE(watchdog.all_moved(at(2, 3)));
  EXPECT_THAT(watchdog.stalled(), ElementsAre("a"));
}

TEST(Watchdog, ACountMayWrap) {
  Watchdog watchdog;
  watchdog.all_moved(at(UINT64_MAX, 1));
  EXPECT_TRUE(watchdog.all_moved(at(0, 2)));
}

}  // namespace
}  // namespace mk::daemon
