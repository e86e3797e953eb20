// A block that several threads run together (Block::agree): what they see of words that others
// write is one answer for all, so that none goes another way than the rest.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <barrier>
#include <cstdint>
#include <thread>
#include <vector>

#include "kernels/comm/block.h"

namespace mk::kernels {
namespace {

constexpr std::uint32_t kEpoch = 7;
constexpr std::size_t kThreads = 4;

/// The vote of all threads; the same for each.
class Votes {
 public:
  bool all(bool here) {
    if (!here) no_.store(true);
    barrier_.arrive_and_wait();
    const bool agreed = !no_.load();
    barrier_.arrive_and_wait();
    no_.store(false);
    barrier_.arrive_and_wait();
    return agreed;
  }

 private:
  std::atomic<bool> no_ = false;
  std::barrier<> barrier_{kThreads};
};

/// One thread's; time passes by one per pause, and its flag shows the epoch from `shows_at` on.
struct Together {
  Votes& votes;
  std::uint32_t* flag;
  std::uint64_t shows_at;
  std::uint64_t now = 0;

  std::uint64_t now_ns() { return now; }
  bool pause(std::uint32_t) {
    if (++now == shows_at) *flag = kEpoch;
    return true;
  }
  void loads_begin() {}
  bool agree(bool here) { return votes.all(here); }
};

struct AgreeTest : ::testing::Test {
  AgreeTest() {
    control.stop = &stop;
    control.record = &record;
    control.timeout_ns = 20;
  }
  /// `run(i, votes)` of each thread, and what it is answered.
  template <class Run>
  static std::array<bool, kThreads> together(Run&& run) {
    Votes votes;
    std::array<bool, kThreads> answers{};
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < kThreads; ++i)
      threads.emplace_back([&, i] { answers[i] = run(i, votes); });
    for (std::thread& thread : threads) thread.join();
    return answers;
  }
  /// What each thread is answered when its own flag (there is one for each here, to have them see
  /// different things) shows the epoch after so many pauses.
  std::array<bool, kThreads> await(const std::array<std::uint64_t, kThreads>& shows_at) {
    std::array<std::uint32_t, kThreads> flags{};
    return together([&](std::size_t i, Votes& votes) {
      Together executor{votes, &flags[i], shows_at[i]};
      BlockTotals totals;
      Block<Together> block(executor, control, totals, Role::kShare, 0, kEpoch);
      return block.await(block.site(FlagKind::kFinished, 1, 2, 3, 0), &flags[i], kEpoch);
    });
  }
  /// What each thread is answered whether the launch has failed, when `failed[i]` is what it sees.
  std::array<bool, kThreads> stopped(const std::array<bool, kThreads>& failed) {
    return together([&](std::size_t i, Votes& votes) {
      std::uint32_t word = failed[i] ? 1 : 0;
      WaitControl own = control;
      own.stop = &word;
      Together executor{votes, nullptr, 0};
      BlockTotals totals;
      const Block<Together> block(executor, own, totals, Role::kShare, 0, kEpoch);
      return block.stopped();
    });
  }

  WaitControl control;
  WaitRecord record;
  std::uint32_t stop = 0;
};

constexpr std::array<bool, kThreads> kAllTrue{true, true, true, true};
constexpr std::array<bool, kThreads> kAllFalse{};

TEST_F(AgreeTest, AllGoOnWhenTheLastHasSeenTheFlag) {
  EXPECT_EQ(await({1, 1, 1, 1}), kAllTrue);
  EXPECT_EQ(await({15, 1, 3, 9}), kAllTrue);
  EXPECT_EQ(stop, 0u);
  EXPECT_EQ(record.claimed, 0u);
}

TEST_F(AgreeTest, NoneGoesOnWhenOneHasWaitedTooLong) {
  constexpr std::uint64_t kNever = 1000;
  for (std::size_t late = 0; late < kThreads; ++late) {
    stop = 0;
    record = {};
    // The others have seen theirs before.
    std::array<std::uint64_t, kThreads> shows_at{1, 1, 1, 1};
    shows_at[late] = kNever;
    EXPECT_EQ(await(shows_at), kAllFalse) << late;
    EXPECT_EQ(stop, 1u);
    EXPECT_EQ(record.claimed, 1u);
    EXPECT_EQ(record.end, WaitEnd::kTimeout);
    EXPECT_EQ(record.site.rank, 1u);
  }
}

TEST_F(AgreeTest, TheLaunchHasFailedForAllWhenOneSeesIt) {
  EXPECT_EQ(stopped({false, false, false, false}), kAllFalse);
  for (std::size_t seer = 0; seer < kThreads; ++seer) {
    std::array<bool, kThreads> failed{};
    failed[seer] = true;
    EXPECT_EQ(stopped(failed), kAllTrue) << seer;
  }
}

}  // namespace
}  // namespace mk::kernels
