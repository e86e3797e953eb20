// A shutdown that hangs is ended, and says at what it hung; one that does not is left alone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <future>

#include "daemon/service/stop_guard.h"

namespace mk::daemon {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::HasSubstr;

TEST(StopGuard, AShutdownThatTakesTooLongIsEndedWithTheStepItIsAt) {
  StopPhase phase = "the first step";
  std::promise<std::string> ended;
  auto why = ended.get_future();
  const StopGuard guard(2s, phase, [&ended](const std::string& text) { ended.set_value(text); });
  phase = "the second step";
  ASSERT_EQ(why.wait_for(30s), std::future_status::ready);
  EXPECT_THAT(why.get(), AllOf(HasSubstr("2.0 s"), HasSubstr("it waited for the second step")));
}

TEST(StopGuard, AShutdownThatEndsInTimeIsLeftAlone) {
  StopPhase phase = "a step";
  std::atomic<bool> ended = false;
  for (int i = 0; i < 100; ++i) {
    const StopGuard guard(1h, phase, [&ended](const std::string&) { ended = true; });
  }
  EXPECT_FALSE(ended);
}

}  // namespace
}  // namespace mk::daemon
