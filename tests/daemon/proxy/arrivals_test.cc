#include "daemon/proxy/arrivals.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace mk::daemon {
namespace {

constexpr std::uint32_t kFlags = 3 * shm::kFlagGranule;

class Arrivals : public testing::Test {
 protected:
  bool arrive(std::uint32_t flag, std::uint32_t epoch) {
    return board_.publish(shm::make_immediate(0, flag, epoch));
  }

  std::vector<std::uint32_t> flags_ = std::vector<std::uint32_t>(kFlags);
  ArrivalBoard board_{flags_.data(), kFlags};
};

TEST_F(Arrivals, ShowTheEpochInTheirFlagAndNowhereElse) {
  EXPECT_TRUE(arrive(70, 1));
  EXPECT_EQ(flags_[70], 1u);
  EXPECT_EQ(std::count(flags_.begin(), flags_.end(), 0u), kFlags - 1);
}

TEST_F(Arrivals, RefuseAFlagThatTheSessionHasNot) {
  EXPECT_TRUE(arrive(kFlags - 1, 1));
  EXPECT_FALSE(arrive(kFlags, 1));
  EXPECT_FALSE(arrive(shm::kFlagsMax - 1, 1));
}

TEST_F(Arrivals, RebuildEpochsBeyondTheImmediatesBits) {
  for (std::uint32_t epoch = 1; epoch < 10'000; ++epoch) {
    ASSERT_TRUE(arrive(epoch % 2, epoch));
    ASSERT_EQ(flags_[epoch % 2], epoch);
  }
}

TEST_F(Arrivals, WrapAroundZero) {
  // Epochs reach 2^32 by way of every one in between; steps of 256 are as much as the immediate can
  // bridge safely.
  flags_[0] = 0;
  std::uint32_t epoch = 0;
  for (std::uint64_t steps = 0; steps < (1ull << 24) + 4; ++steps) {
    epoch += 256;
    ASSERT_TRUE(arrive(0, epoch));
    if (flags_[0] != epoch) FAIL() << "at epoch " << epoch << " the flag shows " << flags_[0];
  }
  EXPECT_EQ(epoch, 4 * 256u);
}

TEST_F(Arrivals, NeverGoBack) {
  arrive(5, 9);
  arrive(5, 7);  // late
  EXPECT_EQ(flags_[5], 9u);
  arrive(6, 8);  // late in its granule, but this flag's first
  EXPECT_EQ(flags_[6], 8u);
  arrive(5, 10);
  EXPECT_EQ(flags_[5], 10u);
}

TEST_F(Arrivals, AnotherGranulesEpochsDoNotMatter) {
  for (std::uint32_t epoch = 1; epoch <= 5'000; ++epoch) arrive(0, epoch);
  // A second operator begins at 1 in its own range.
  EXPECT_TRUE(arrive(shm::kFlagGranule, 1));
  EXPECT_EQ(flags_[shm::kFlagGranule], 1u);
  EXPECT_TRUE(arrive(shm::kFlagGranule - 1, 5'001));
  EXPECT_EQ(flags_[shm::kFlagGranule - 1], 5'001u);
}

TEST_F(Arrivals, AnyOrderWithinTwoBanksEndsAtTheLatest) {
  std::mt19937 random(3);
  std::vector<std::pair<std::uint32_t, std::uint32_t>> pending;  // flag, epoch
  std::uint32_t epoch = 0;
  for (int launch = 0; launch < 3'000; ++launch) {
    ++epoch;
    for (std::uint32_t flag = 0; flag < 8; ++flag) pending.push_back({flag * 2 + epoch % 2, epoch});
    if (launch % 2 == 1) {
      std::shuffle(pending.begin(), pending.end(), random);
      for (const auto& [flag, value] : pending) arrive(flag, value);
      pending.clear();
      for (std::uint32_t flag = 0; flag < 16; ++flag) {
        ASSERT_EQ(flags_[flag], flag % 2 == epoch % 2 ? epoch : epoch - 1);
      }
    }
  }
}

}  // namespace
}  // namespace mk::daemon
