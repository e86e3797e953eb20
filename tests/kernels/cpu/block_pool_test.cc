// The CPU executor's blocks: every block runs once per round, all at the same time, and memory is
// handed over.
#include "kernels/cpu/block_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <vector>

namespace mk::kernels {
namespace {

struct Count final : BlockWork {
  std::vector<int> runs = std::vector<int>(5, 0);  // plain: the pool orders accesses
  void run_block(std::uint32_t block) override { ++runs[block]; }
};

TEST(BlockPool, RunsEveryBlockOncePerRound) {
  auto pool = BlockPool::start(5);
  ASSERT_TRUE(pool);
  EXPECT_EQ((*pool)->blocks(), 5u);
  Count count;
  for (int round = 1; round <= 200; ++round) {
    (*pool)->run(count);
    for (int runs : count.runs) ASSERT_EQ(runs, round);
  }
}

struct Meet final : BlockWork {
  std::atomic<int> here{0};
  void run_block(std::uint32_t) override {
    ++here;
    while (here.load() < 4) std::this_thread::yield();
  }
};

TEST(BlockPool, BlocksRunAtTheSameTime) {
  auto pool = BlockPool::start(4);
  ASSERT_TRUE(pool);
  Meet meet;
  (*pool)->run(meet);  // would not return if one had to end before another begins
  EXPECT_EQ(meet.here.load(), 4);
}

TEST(BlockPool, EndsWithoutEverHavingRun) { ASSERT_TRUE(BlockPool::start(3)); }

}  // namespace
}  // namespace mk::kernels
