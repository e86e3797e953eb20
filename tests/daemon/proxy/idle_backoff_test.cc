#include "daemon/proxy/idle_backoff.h"

#include <gtest/gtest.h>

namespace mk::daemon {
namespace {

constexpr std::uint64_t kSpinNs = 50'000;
constexpr std::uint64_t kSleepNsMax = 500'000;
constexpr std::uint64_t kNow = 1'000'000'000;

class Backoff : public testing::Test {
 protected:
  Backoff() { backoff_.on_work(kNow); }
  IdleBackoff backoff_{kSpinNs, kSleepNsMax};
};

TEST_F(Backoff, PollsHotAfterWork) {
  EXPECT_EQ(backoff_.sleep_ns(kNow, {}), 0u);
  EXPECT_EQ(backoff_.sleep_ns(kNow + kSpinNs - 1, {}), 0u);
}

TEST_F(Backoff, SleepsAnEighthOfThePauseUpToItsLimit) {
  EXPECT_EQ(backoff_.sleep_ns(kNow + kSpinNs, {}), kSpinNs / 8);
  EXPECT_EQ(backoff_.sleep_ns(kNow + 800'000, {}), 100'000u);
  EXPECT_EQ(backoff_.sleep_ns(kNow + 4'000'000, {}), kSleepNsMax);
  EXPECT_EQ(backoff_.sleep_ns(kNow + 500'000'000, {}), kSleepNsMax);
}

TEST_F(Backoff, SleepsLongerAfterSeconds) {
  EXPECT_EQ(backoff_.sleep_ns(kNow + 2'048'000'000, {}), 2'000'000u);
  EXPECT_EQ(backoff_.sleep_ns(kNow + 3'600'000'000'000, {}),
            IdleBackoff::kLongSleeps * kSleepNsMax);
}

TEST_F(Backoff, WorkMakesItHotAgain) {
  ASSERT_NE(backoff_.sleep_ns(kNow + 10'000'000, {}), 0u);
  backoff_.on_work(kNow + 10'000'000);
  EXPECT_EQ(backoff_.sleep_ns(kNow + 10'000'001, {}), 0u);
}

TEST_F(Backoff, NeverSleepsPastWhatIsDue) {
  const std::uint64_t later = kNow + 10'000'000;
  EXPECT_EQ(backoff_.sleep_ns(later, 0), 0u) << "due at once";
  EXPECT_EQ(backoff_.sleep_ns(later, later - 5), 0u) << "overdue";
  EXPECT_EQ(backoff_.sleep_ns(later, later + IdleBackoff::kSleepMinNs - 1), 0u)
      << "too short to sleep";
  EXPECT_EQ(backoff_.sleep_ns(later, later + 30'000), 30'000u);
  EXPECT_EQ(backoff_.sleep_ns(later, later + 3'000'000), kSleepNsMax)
      << "rings are polled meanwhile";
}

TEST_F(Backoff, AClockThatStandsOrStepsBackIsNoSleep) {
  EXPECT_EQ(backoff_.sleep_ns(kNow - 1'000'000'000, {}), 0u);
}

TEST(BackoffLimits, WithoutSpinningItSleepsAtOnceAndWithoutSleepItNeverDoes) {
  EXPECT_EQ(IdleBackoff(0, kSleepNsMax).sleep_ns(0, {}), IdleBackoff::kSleepMinNs);
  EXPECT_EQ(IdleBackoff(0, 0).sleep_ns(kNow, {}), 0u);
}

}  // namespace
}  // namespace mk::daemon
