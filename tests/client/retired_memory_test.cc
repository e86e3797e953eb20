// What an operator on a GPU leaves behind: it is freed when nobody of this process can be kept
// waiting by that, and not by the thread that destroys the operator.
#include "client/src/retired_memory.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <optional>
#include <stop_token>
#include <thread>
#include <utility>

#include "client/src/gpu_launches.h"
#include "shm/atomic.h"
#include "tests/shm/gpu/fake_driver.h"

namespace mk::client {
namespace {

using namespace std::chrono_literals;

class Retired : public testing::Test {
 protected:
  gpu::Allocation allocate() { return gpu::Allocation::create(driver_, 0, 4096).value(); }
  /// Says when it goes, and whether the memory was still there.
  std::shared_ptr<void> rest() {
    return {new int, [this](int* what) {
              delete what;
              memory_was_there_ = driver_->allocations() == 1;
              gone_by_ = std::this_thread::get_id();
            }};
  }
  bool gone() const { return gone_by_.load() != std::thread::id(); }

  std::shared_ptr<gpu::test::FakeDriver> driver_ =
      std::make_shared<gpu::test::FakeDriver>(std::make_shared<gpu::test::FakeMachine>());
  std::atomic<bool> memory_was_there_{false};
  std::atomic<std::thread::id> gone_by_{};
};

TEST_F(Retired, TheRestGoesWithTheMemoryAndNotBefore) {
  std::atomic<bool> busy{true};
  RetiredMemory retired([&] { return busy.load(); });
  const std::uint64_t number = retired.add(allocate(), nullptr, rest());
  EXPECT_FALSE(gone()) << "the daemon has not answered";
  retired.answered(number, true);
  std::this_thread::sleep_for(20ms);
  EXPECT_FALSE(gone()) << "a launch is under way";
  busy = false;
  EXPECT_TRUE(retired.await_answer(0, RetiredMemory::Clock::now() + 60s));
  EXPECT_TRUE(gone());
  EXPECT_TRUE(memory_was_there_) << "what uses it goes before it";
  EXPECT_NE(gone_by_.load(), std::this_thread::get_id());
  EXPECT_EQ(driver_->allocations(), 0u);
}

TEST_F(Retired, AllGoesWithTheSessionWhateverIsUnderWay) {
  {
    RetiredMemory retired([] { return true; });
    const std::uint64_t number = retired.add(allocate(), nullptr, rest());
    retired.add(allocate(), nullptr);
    retired.answered(number, false);
    EXPECT_FALSE(gone());
  }
  EXPECT_TRUE(gone());
  EXPECT_EQ(driver_->allocations(), 0u);
}

TEST_F(Retired, ASessionThatKeepsNothingWaitsForNobody) {
  const auto later = RetiredMemory::Clock::now() + 1h;
  RetiredMemory retired([] { return true; });
  retired.await_idle(later);
  retired.answered(retired.add(std::nullopt, nullptr), true);
  retired.await_idle(later);
  EXPECT_LT(RetiredMemory::Clock::now(), later);
}

TEST_F(Retired, ASessionThatKeepsMemoryWaitsForLaunchesOfTheProcess) {
  int looks = 0;
  RetiredMemory retired([&] { return ++looks < 4; });
  retired.add(allocate(), nullptr);
  retired.await_idle(RetiredMemory::Clock::now() + 60s);
  EXPECT_EQ(looks, 4);
}

// Two ranks that are threads of this process: while either's launch is under way, neither frees.
TEST(GpuLaunches, OfAllSessionsOfTheProcessCount) {
  std::uint64_t ours = 4, theirs = 7;
  EXPECT_FALSE(GpuLaunches::under_way());
  const GpuLaunches own(&ours);
  EXPECT_FALSE(GpuLaunches::under_way());
  {
    const GpuLaunches other(&theirs);
    EXPECT_TRUE(GpuLaunches::under_way());
    ++theirs;
    EXPECT_FALSE(GpuLaunches::under_way());
    ++theirs;
  }
  EXPECT_FALSE(GpuLaunches::under_way()) << "that session has gone";
}

std::atomic<bool> queued{false};

TEST(GpuLaunches, ThoseThatHaveNotBegunCountToo) {
  GpuLaunches::ask_also([] { return queued.load(); });
  EXPECT_FALSE(GpuLaunches::under_way());
  queued = true;
  EXPECT_TRUE(GpuLaunches::under_way());
  queued = false;
  EXPECT_FALSE(GpuLaunches::under_way());
  GpuLaunches::ask_also(nullptr);
}

// A launch that begins between the question and the freeing would be waited for with the driver
// locked, and may wait for this process itself.
TEST_F(Retired, NoLaunchBeginsWhileMemoryIsFreed) {
  std::uint64_t word = 0;
  const GpuLaunches session(&word);
  std::atomic<bool> freeing{false};
  std::atomic<int> overlaps{0}, freed{0};
  constexpr int kRounds = 300;
  std::jthread launches([&](const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      const auto begins = GpuLaunches::begin();
      shm::store_relaxed(&word, word + 1);
      if (freeing) ++overlaps;
      std::this_thread::yield();
      if (freeing) ++overlaps;
      shm::store_relaxed(&word, word + 1);
    }
  });
  {
    RetiredMemory retired([] { return GpuLaunches::under_way(); });
    for (int i = 0; i < kRounds; ++i) {
      auto rest = std::shared_ptr<void>(nullptr, [&](void*) {
        freeing = true;
        std::this_thread::yield();
        freeing = false;
        ++freed;
      });
      retired.answered(retired.add(allocate(), nullptr, std::move(rest)), true);
    }
    while (freed != kRounds) std::this_thread::yield();
  }
  EXPECT_EQ(overlaps, 0);
}

}  // namespace
}  // namespace mk::client
