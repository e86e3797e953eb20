// The search for a launch's partition, over launches whose times are computed.
#include "kernels/comm/partition_search.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <random>

namespace mk::kernels {
namespace {

constexpr std::uint32_t kAll = 132;
constexpr std::uint32_t kMost = 128;

/// A launch's time by its communicating SMs.
using Model = std::function<double(std::uint32_t)>;

/// Work of both kinds in SM nanoseconds, side by side; a link carries what `link_ns` takes.
Model model_of(double compute, double communicate, double link_ns = 0) {
  return [=](std::uint32_t target) {
    const double first = compute / (kAll - target);
    const double second = communicate / target;
    return 1000 + std::max({first, second, link_ns});
  };
}
double best_of(const Model& model) {
  double best = model(1);
  for (std::uint32_t target = 2; target <= kMost; ++target) best = std::min(best, model(target));
  return best;
}
/// Until it is settled; the measurements that took.
std::uint32_t settle(PartitionSearch& search, const Model& model) {
  std::uint32_t measured = 0;
  do {
    search.measured(static_cast<std::uint64_t>(model(search.target())));
    ++measured;
  } while (!search.settled() && measured < 200);
  return measured;
}

TEST(PartitionSearch, FindsTheBestFromFourTimesTooFewAndTooMany) {
  for (const double communicate : {2e6, 4e6, 1e7, 2e7, 4e7}) {
    for (const double link_ns : {0.0, 4e5, 1.2e6}) {
      const Model model = model_of(8e7, communicate, link_ns);
      const auto balanced =
          static_cast<std::uint32_t>(std::lround(kAll * communicate / (8e7 + communicate)));
      for (const std::uint32_t start :
           {balanced, std::max(1u, balanced / 4), std::min(kMost, 4 * balanced), 1u, kMost}) {
        SCOPED_TRACE(testing::Message() << communicate << ", " << link_ns << " from " << start);
        PartitionSearch search(1, kMost, start);
        EXPECT_EQ(search.target(), start);
        EXPECT_LE(settle(search, model), 20u);
        EXPECT_EQ(search.target(), search.best());
        EXPECT_LE(model(search.target()), 1.03 * best_of(model));
      }
    }
  }
}

TEST(PartitionSearch, KeepsItsBounds) {
  for (const std::uint32_t least : {1u, 5u}) {
    const auto fewer = [](std::uint32_t target) { return 1e6 + 5e4 * target; };
    PartitionSearch low(least, 9, 100);
    EXPECT_EQ(low.target(), 9u);
    settle(low, fewer);
    EXPECT_EQ(low.best(), least);
    const auto more = [](std::uint32_t target) { return 1e6 - 5e4 * target; };
    PartitionSearch high(least, 9, 0);
    EXPECT_EQ(high.target(), least);
    settle(high, more);
    EXPECT_EQ(high.best(), 9u);
  }
  PartitionSearch one(3, 3, 3);
  settle(one, model_of(1e6, 1e6));
  EXPECT_TRUE(one.settled());
  EXPECT_EQ(one.target(), 3u);
}

TEST(PartitionSearch, FollowsADisturbance) {
  const Model before = model_of(8e7, 6e6);
  const Model after = model_of(8e7, 4e7);
  PartitionSearch search(1, kMost, 8);
  settle(search, before);
  const double was = after(search.target());
  EXPECT_GT(was, 1.5 * best_of(after));
  // One that is unlike is no disturbance yet.
  search.measured(static_cast<std::uint64_t>(was));
  EXPECT_FALSE(search.settled());
  search.measured(static_cast<std::uint64_t>(before(search.target())));
  EXPECT_TRUE(search.settled());
  for (int look = 0; look < 2; ++look) {
    EXPECT_EQ(search.target(), search.best());
    search.measured(static_cast<std::uint64_t>(was));
    EXPECT_FALSE(search.settled());
  }
  settle(search, after);
  EXPECT_LE(after(search.target()), 1.03 * best_of(after));
  // And back. Computing takes as long as ever, so that only a look at the neighbours tells.
  for (int look = 0; look < 40; ++look)
    search.measured(static_cast<std::uint64_t>(before(search.target())));
  EXPECT_LE(before(search.best()), 1.03 * best_of(before));
}

TEST(PartitionSearch, TriesNeighboursNowAndThen) {
  // Slowly, each step too small for a disturbance.
  PartitionSearch search(1, kMost, 8);
  double communicate = 6e6;
  settle(search, model_of(8e7, communicate));
  for (int look = 0; look < 400; ++look) {
    communicate = std::min(4e7, communicate * 1.01);
    search.measured(static_cast<std::uint64_t>(model_of(8e7, communicate)(search.target())));
  }
  const Model now = model_of(8e7, communicate);
  EXPECT_LE(now(search.best()), 1.05 * best_of(now));
}

TEST(PartitionSearch, IsHardlyMisledByNoise) {
  std::mt19937_64 random{std::random_device{}()};
  std::uniform_real_distribution<double> late(0, 0.02);
  const Model model = model_of(8e7, 8e6);
  const Model noisy = [&](std::uint32_t target) { return model(target) * (1 + late(random)); };
  for (int run = 0; run < 100; ++run) {
    PartitionSearch search(1, kMost, run % 2 == 0 ? 3 : 48);
    settle(search, noisy);
    EXPECT_LE(model(search.best()), 1.10 * best_of(model));
  }
}

}  // namespace
}  // namespace mk::kernels
