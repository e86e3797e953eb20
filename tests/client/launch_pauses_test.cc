// A launch after a pause is told to the daemon, one in a row of launches is not.
#include "client/src/launch_pauses.h"

#include <gtest/gtest.h>

namespace mk::client {
namespace {

TEST(LaunchPauses, TellOfTheFirstLaunchAndOfThoseAfterAPause) {
  LaunchPauses pauses;
  std::uint64_t now_ns = 1'000;
  EXPECT_TRUE(pauses.begins(now_ns));
  for (int launch = 0; launch < 100; ++launch)
    EXPECT_FALSE(pauses.begins(now_ns += LaunchPauses::kPauseNs - 1));
  EXPECT_TRUE(pauses.begins(now_ns += LaunchPauses::kPauseNs));
  EXPECT_FALSE(pauses.begins(now_ns - 10)) << "of two threads, the later one may be first";
}

}  // namespace
}  // namespace mk::client
