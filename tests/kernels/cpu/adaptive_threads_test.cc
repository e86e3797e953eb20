// A CPU operator's threads, dealt out anew between launches: whose they are, and, in virtual time,
// how many there should be.
#include "kernels/cpu/adaptive_threads.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

namespace mk::kernels {
namespace {

using Roles = std::vector<Workers RoleBlocks::*>;
const Roles kThree = {&RoleBlocks::pull, &RoleBlocks::share, &RoleBlocks::receive};

std::uint32_t others_of(const RoleBlocks& blocks, const Roles& roles) {
  std::uint32_t others = 0;
  for (const auto role : roles) others += (blocks.*role).count();
  return others;
}

TEST(AdaptiveThreads, ThereIsNothingToDealOutWithOneOfEach) {
  const RoleBlocks ones;
  EXPECT_EQ(AdaptiveThreads::create(true, ones, kThree), nullptr);
  RoleBlocks more;
  more.compute = 2;
  EXPECT_NE(AdaptiveThreads::create(true, more, kThree), nullptr);
  EXPECT_EQ(AdaptiveThreads::create(false, more, kThree), nullptr);
  EXPECT_EQ(AdaptiveThreads::create(true, more, {}), nullptr) << "a rank alone";
  EXPECT_EQ(compute_threads(nullptr, more), 2u);
}

TEST(AdaptiveThreads, AreAsManyAsPlannedAndEachRoleKeepsOne) {
  std::mt19937_64 random(1);
  const auto draw = [&](std::uint32_t most) {
    return static_cast<std::uint32_t>(1 + random() % most);
  };
  for (int round = 0; round < 300; ++round) {
    Roles roles = kThree;
    roles.resize(draw(3));
    const std::uint32_t most = round % 10 == 0 ? kBlocksMax : 12;
    RoleBlocks planned;
    planned.compute = draw(most);
    planned.pull = draw(most);
    planned.share = draw(most);
    planned.receive = draw(most);
    planned.send = 3;
    planned.plan = 2;
    const std::uint32_t all = planned.compute.count() + others_of(planned, roles);
    const auto threads = AdaptiveThreads::create(true, planned, roles);
    if (threads == nullptr) {
      EXPECT_TRUE(all == roles.size() + 1 || all > kBlocksMax);
      continue;
    }
    RoleBlocks blocks = planned;
    threads->choose(100, true, 7, blocks);
    if (others_of(planned, roles) <= kBlocksMax) {
      EXPECT_EQ(blocks.compute, planned.compute);
      for (const auto role : roles) EXPECT_EQ(blocks.*role, planned.*role);
    }
    for (int launch = 0; launch < 200; ++launch) {
      threads->measured(1000 + random() % 1000);
      threads->choose(100, launch % 5 != 0, 8, blocks);
      const std::uint32_t others = others_of(blocks, roles);
      ASSERT_EQ(blocks.compute.count() + others, all);
      ASSERT_GE(blocks.compute, 1u);
      ASSERT_LE(blocks.compute, std::min(kBlocksMax, threads->most_compute()));
      ASSERT_EQ(blocks.send, 3u);
      ASSERT_EQ(blocks.plan, 2u);
      for (const auto role : roles) {
        ASSERT_GE(blocks.*role, 1u);
        ASSERT_LE(blocks.*role, kBlocksMax);
        // In the plan's proportion, but for whole threads.
        const double even = 1.0 * others * (planned.*role).count() / others_of(planned, roles);
        ASSERT_NEAR((blocks.*role).count(), even, 2.0);
      }
      ASSERT_EQ(threads->stats().last, others);
      ASSERT_EQ(threads->step().target, others);
      ASSERT_EQ(threads->step().communicating, others);
    }
  }
}

TEST(AdaptiveThreads, FindTheBestNumbersFromFourTimesTooFewAndTooMany) {
  std::mt19937_64 random(2);
  for (const double share : {0.1, 0.25, 0.5}) {
    constexpr std::uint32_t kAll = 24;
    // Both kinds of work, in nanoseconds of a thread; a launch is late now and then.
    const auto time = [&](std::uint32_t others) {
      return 1e6 + std::max((1 - share) * 1e9 / (kAll - others), share * 1e9 / others);
    };
    double best = time(1);
    for (std::uint32_t others = 2; others < kAll; ++others) best = std::min(best, time(others));
    const auto balanced = static_cast<std::uint32_t>(std::lround(kAll * share));
    for (const std::uint32_t start :
         {balanced, std::max(1u, balanced / 4), std::min(kAll - 1, 4 * balanced)}) {
      RoleBlocks blocks;
      blocks.receive = start;
      blocks.compute = kAll - start;
      const auto threads = AdaptiveThreads::create(true, blocks, {&RoleBlocks::receive});
      ASSERT_NE(threads, nullptr);
      for (int launch = 0; launch < 200; ++launch) {
        threads->choose(3000, true, 0, blocks);
        const double late = random() % 16 == 0 ? 1.5 : 1 + 0.01 * static_cast<double>(random() % 3);
        threads->measured(static_cast<std::uint64_t>(time(blocks.receive.count()) * late));
      }
      EXPECT_LE(time(blocks.receive.count()), 1.10 * best) << share << " from " << start;
    }
  }
}

}  // namespace
}  // namespace mk::kernels
