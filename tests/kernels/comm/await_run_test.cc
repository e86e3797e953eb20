// Block::await_run: how far flags that follow each other show a launch, for an executor that looks
// at one and for one that looks at many at once.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "kernels/comm/block.h"

namespace mk::kernels {
namespace {

constexpr std::uint32_t kEpoch = 7;

/// Time passes by one per pause; `at_pause` may set flags meanwhile.
struct LooksAtOne {
  std::uint64_t now = 0;
  std::vector<std::vector<std::uint32_t*>> later;  ///< what is shown at each of the next pauses

  std::uint64_t now_ns() { return now; }
  bool pause(std::uint32_t) {
    if (now < later.size())
      for (std::uint32_t* flag : later[now]) *flag = kEpoch;
    ++now;
    return true;
  }
  void loads_begin() { ++loads; }
  std::uint32_t loads = 0;
};

struct LooksAtMany : LooksAtOne {
  static constexpr std::uint32_t kMost = 5;  ///< at a time
  std::uint32_t first = 0;

  template <class Flag>
  std::uint32_t first_missing(std::uint32_t begin, std::uint32_t end, std::uint32_t wanted,
                              Flag&& flag) {
    first = *flag(begin);
    end = std::min(end, begin + kMost);
    while (begin < end && shm::epoch_reached(*flag(begin), wanted)) ++begin;
    return begin;
  }
  std::uint32_t first_seen() const { return first; }
};

template <class Executor>
struct AwaitRunTest : ::testing::Test {
  AwaitRunTest() {
    control.stop = &stop;
    control.record = &record;
    control.timeout_ns = 20;
  }
  /// The answer for flags that lie `step` apart.
  std::uint32_t await(std::uint32_t begin, std::uint32_t least, std::uint32_t end,
                      std::uint32_t step) {
    Block<Executor> block(executor, control, totals, Role::kSend, 0, kEpoch);
    return block.await_run(
        begin, least, end, kEpoch, FlagRow{flags.data(), step},
        [&](std::uint32_t i) { return block.site(FlagKind::kChunkReduced, 1, i, 0, 0); });
  }

  bool await_each(std::uint32_t count, std::uint32_t step) {
    Block<Executor> block(executor, control, totals, Role::kSend, 0, kEpoch);
    return block.await_each(count, kEpoch, FlagRow{flags.data(), step}, [&](std::uint32_t i) {
      return block.site(FlagKind::kChunkReduced, 1, i, 0, 0);
    });
  }

  std::vector<std::uint32_t> flags = std::vector<std::uint32_t>(64, kEpoch - 1);
  Executor executor;
  WaitControl control;
  WaitRecord record;
  BlockTotals totals;
  std::uint32_t stop = 0;
};
using Executors = ::testing::Types<LooksAtOne, LooksAtMany>;
TYPED_TEST_SUITE(AwaitRunTest, Executors);

// Every pattern of eight flags, every run of them: as far as they show it, where one look tells.
TYPED_TEST(AwaitRunTest, AnswersHowFarTheFlagsShowIt) {
  constexpr std::uint32_t kFlags = 8;
  for (std::uint32_t step : {1u, 3u}) {
    for (std::uint32_t shown = 0; shown < 1u << kFlags; ++shown) {
      for (std::uint32_t i = 0; i < kFlags; ++i)
        this->flags[i * step] = kEpoch - 1 + (shown >> i & 1) * (1 + i % 2);
      for (std::uint32_t begin = 0; begin < kFlags; ++begin) {
        std::uint32_t missing = begin;
        while (missing < kFlags && (shown >> missing & 1) != 0) ++missing;
        for (std::uint32_t least = begin; least <= missing; ++least) {
          for (std::uint32_t end = least; end <= kFlags; ++end) {
            const std::uint32_t answer = this->await(begin, least, end, step);
            ASSERT_GE(answer, least) << shown << " " << begin << " " << end;
            ASSERT_LE(answer, std::max(least, std::min(missing, end)));
            if (std::is_same_v<TypeParam, LooksAtMany> && least > begin &&
                end - begin <= LooksAtMany::kMost) {
              ASSERT_EQ(answer, std::min(missing, end)) << shown << " " << begin << " " << end;
            }
          }
        }
      }
    }
  }
  EXPECT_EQ(this->totals.waits.count, 0u);
}

// Flags that come one after the other, in any order: it ends when the first `least` are there, and
// no sooner.
TYPED_TEST(AwaitRunTest, WaitsUntilTheFirstOnesAreThere) {
  std::mt19937 random(3);
  for (int round = 0; round < 300; ++round) {
    constexpr std::uint32_t kFlags = 12;
    std::fill(this->flags.begin(), this->flags.end(), kEpoch - 1);
    const auto least = static_cast<std::uint32_t>(1 + random() % kFlags);
    std::vector<std::uint32_t> order(kFlags);
    for (std::uint32_t i = 0; i < kFlags; ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random);
    this->executor = TypeParam();
    std::uint32_t there = 0;  // pauses after which the first `least` are
    for (std::uint32_t i = 0; i < kFlags; ++i) {
      this->executor.later.push_back({&this->flags[order[i]]});
      if (order[i] < least) there = i + 1;
    }
    const std::uint32_t answer = this->await(0, least, kFlags, 1);
    ASSERT_GE(answer, least);
    ASSERT_LE(answer, kFlags);
    for (std::uint32_t i = 0; i < answer; ++i) ASSERT_EQ(this->flags[i], kEpoch);
    ASSERT_EQ(this->executor.now, there);
  }
}

// All of them, in any order, and no sooner; then bulk loads see what lies behind each: what was
// seen at one look and what was seen at another.
TYPED_TEST(AwaitRunTest, AwaitsEach) {
  std::mt19937 random(4);
  for (int round = 0; round < 300; ++round) {
    const auto count = static_cast<std::uint32_t>(random() % 13);
    const auto step = static_cast<std::uint32_t>(1 + random() % 3);
    std::fill(this->flags.begin(), this->flags.end(), kEpoch - 1);
    this->executor = TypeParam();
    std::vector<std::uint32_t*> wanted;
    for (std::uint32_t i = 0; i < count; ++i) wanted.push_back(&this->flags[i * step]);
    std::shuffle(wanted.begin(), wanted.end(), random);
    for (std::size_t at = 0; at < wanted.size();) {
      const std::size_t end = std::min(wanted.size(), at + random() % 4);
      this->executor.later.emplace_back(wanted.begin() + at, wanted.begin() + end);
      at = end;
    }
    const std::size_t pauses = this->executor.later.size();
    ASSERT_TRUE(this->await_each(count, step));
    ASSERT_EQ(this->executor.now, pauses);
    const bool many = std::is_same_v<TypeParam, LooksAtMany>;
    ASSERT_EQ(this->executor.loads, many ? 1 : count);
  }
}

TYPED_TEST(AwaitRunTest, TheDeadlineNamesTheFirstOfAllThatIsMissing) {
  for (std::uint32_t i : {0u, 1u, 3u}) this->flags[i] = kEpoch;
  this->flags[2] = kEpoch - 2;
  EXPECT_FALSE(this->await_each(6, 1));
  EXPECT_EQ(this->record.end, WaitEnd::kTimeout);
  EXPECT_EQ(this->record.site.index[0], 2u);
  EXPECT_EQ(this->record.seen, kEpoch - 2);
  const bool many = std::is_same_v<TypeParam, LooksAtMany>;
  EXPECT_EQ(this->executor.loads, many ? 0u : 2u);
}

TYPED_TEST(AwaitRunTest, TheDeadlineNamesTheFirstThatIsMissing) {
  for (std::uint32_t i : {2u, 3u, 5u}) this->flags[i] = kEpoch;
  this->flags[4] = kEpoch - 3;
  EXPECT_EQ(this->await(2, 6, 8, 1), 2u);
  EXPECT_EQ(this->record.end, WaitEnd::kTimeout);
  EXPECT_EQ(this->record.site.kind, FlagKind::kChunkReduced);
  EXPECT_EQ(this->record.site.index[0], 4u);
  EXPECT_EQ(this->record.expected, kEpoch);
  EXPECT_EQ(this->record.seen, kEpoch - 3);
  EXPECT_EQ(this->stop, 1u);
}

}  // namespace
}  // namespace mk::kernels
