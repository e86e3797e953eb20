// Which launches are measured for a partition, over launches whose times are computed.
#include "kernels/comm/partition_searches.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <set>
#include <vector>

namespace mk::kernels {
namespace {

constexpr std::uint32_t kAll = 64;
constexpr std::uint32_t kMost = 60;

/// A launch's time; known some looks later than asked, as of launches that are queued.
struct Time {
  std::uint64_t its_ns = 0;
  mutable std::uint32_t looks_left = 0;

  bool is_there() const {
    if (looks_left == 0) return true;
    --looks_left;
    return false;
  }
  std::uint64_t ns() const { return its_ns; }
};
using Searches = PartitionSearches<Time>;

/// By target: work of both kinds side by side.
double ns_of(std::uint32_t target, double communicate) {
  return 1000 + std::max(8e7 / (kAll - target), communicate / target);
}
double best_ns(double communicate) {
  double best = ns_of(1, communicate);
  for (std::uint32_t target = 2; target <= kMost; ++target)
    best = std::min(best, ns_of(target, communicate));
  return best;
}
/// The targets of so many launches.
std::vector<std::uint32_t> launch(Searches& searches, std::uint32_t m, std::uint32_t launches,
                                  double communicate, std::uint32_t late = 0) {
  std::vector<std::uint32_t> targets;
  for (std::uint32_t i = 0; i < launches; ++i) {
    targets.push_back(searches.choose(m, true));
    if (Time* const time = searches.next_measurement())
      *time = {static_cast<std::uint64_t>(ns_of(targets.back(), communicate)), late};
  }
  return targets;
}

TEST(PartitionSearches, FindTheBestFromFourTimesTooFewAndTooMany) {
  for (const double communicate : {2e6, 1e7, 4e7}) {
    const auto balanced =
        static_cast<std::uint32_t>(std::lround(kAll * communicate / (8e7 + communicate)));
    for (const std::uint32_t start :
         {balanced, std::max(1u, balanced / 4), std::min(kMost, 4 * balanced)}) {
      for (const std::uint32_t late : {0u, 1u}) {
        Searches searches(1, kMost, start);
        launch(searches, 512, late == 0 ? 120 : 480, communicate, late);
        EXPECT_LE(ns_of(searches.choose(512, false), communicate), 1.05 * best_ns(communicate))
            << communicate << " from " << start;
      }
    }
  }
}

TEST(PartitionSearches, ChangeTheTargetAfterWindowsOnly) {
  Searches searches(1, kMost, 4);
  const auto targets = launch(searches, 512, 400, 1e7);
  std::uint32_t moves = 0;
  for (std::uint32_t i = 0; i < targets.size(); ++i) {
    // The last launch of the warm-up is the first one of a window.
    if (i + 1 < Searches::kWarmUp + Searches::kWindow) {
      EXPECT_EQ(targets[i], 4u) << i;
    }
    if (i == 0 || targets[i] == targets[i - 1]) continue;
    ++moves;
    EXPECT_EQ((i + 1) % Searches::kWindow, 0u) << i;
  }
  EXPECT_EQ(searches.stats().moves, moves);
  EXPECT_EQ(searches.stats().first, targets.back());
  EXPECT_EQ(searches.stats().last, targets.back());
}

TEST(PartitionSearches, MeasureFewLaunchesOnceSettled) {
  Searches searches(1, kMost, 8);
  launch(searches, 512, 200, 1e7);
  std::uint32_t measured = 0;
  constexpr std::uint32_t kLaunches = 10 * (Searches::kRest + Searches::kWindow);
  for (std::uint32_t i = 0; i < kLaunches; ++i) {
    const std::uint32_t target = searches.choose(512, true);
    Time* const time = searches.next_measurement();
    if (time == nullptr) continue;
    *time = {static_cast<std::uint64_t>(ns_of(target, 1e7)), 0};
    ++measured;
  }
  // Besides the windows in rest, one look at the near neighbours.
  EXPECT_LE(measured, Searches::kMeasured * 20);
  EXPECT_GE(measured, Searches::kMeasured * 9);
}

TEST(PartitionSearches, LaunchesThatNobodyMeasuresHaveTheBest) {
  Searches searches(1, kMost, 4);
  // Captured: nothing is known yet.
  for (int i = 0; i < 50; ++i) {
    EXPECT_EQ(searches.choose(512, false), 4u);
    EXPECT_EQ(searches.next_measurement(), nullptr);
  }
  const std::uint32_t best = launch(searches, 512, 120, 1e7).back();
  EXPECT_NE(best, 4u);
  EXPECT_EQ(searches.choose(512, false), best);
  EXPECT_EQ(searches.next_measurement(), nullptr);
  // One that does not adapt at all, as an unfused one.
  EXPECT_EQ(searches.choose_first(), 4u);
  EXPECT_EQ(searches.next_measurement(), nullptr);
  EXPECT_EQ(searches.choose(512, true), best);
}

// On a GPU that allocates, which ends a capture.
TEST(PartitionSearches, MakeNoMeasurementWhileNothingIsMeasurable) {
  struct Counted : Time {
    explicit Counted() { ++made(); }
    static std::uint32_t& made() {
      static std::uint32_t count = 0;
      return count;
    }
  };
  PartitionSearches<Counted> searches(1, kMost, 4);
  for (const std::uint32_t m : {512u, 64u, 1u}) EXPECT_EQ(searches.choose(m, false), 4u);
  EXPECT_EQ(Counted::made(), 0u);
  searches.choose(512, true);
  EXPECT_EQ(Counted::made(), PartitionSearches<Counted>::kMeasured);
  searches.choose(64, false);
  EXPECT_EQ(Counted::made(), PartitionSearches<Counted>::kMeasured);
}

TEST(PartitionSearches, LearnNothingFromFailedLaunches) {
  Searches searches(1, kMost, 4);
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(searches.choose(512, true), 4u);
    if (Time* const time = searches.next_measurement()) *time = {};
  }
}

TEST(PartitionSearches, EachHeightHasItsOwnAndBeginsWithItsNeighbours) {
  Searches searches(1, kMost, 4);
  const std::uint32_t of_small = launch(searches, 128, 120, 2e6).back();
  const std::uint32_t of_large = launch(searches, 8192, 120, 4e7).back();
  EXPECT_LT(4 * of_small, of_large);
  EXPECT_EQ(searches.choose(160, true), of_small);
  EXPECT_EQ(searches.choose(6000, true), of_large);
  EXPECT_EQ(searches.choose(128, true), of_small);
}

TEST(PartitionSearches, ManyHeightsTakeTheNearestOnes) {
  Searches searches(1, kMost, 4);
  for (std::uint32_t i = 0; i < Searches::kHeightsMax; ++i)
    launch(searches, 100 + 100 * i, 120, i % 2 == 0 ? 2e6 : 4e7);
  const std::uint32_t few = searches.choose(100, true);
  const std::uint32_t many = searches.choose(200, true);
  EXPECT_LT(4 * few, many);
  for (int i = 0; i < 50; ++i) {
    EXPECT_EQ(searches.choose(110, true), few);
    EXPECT_EQ(searches.next_measurement(), nullptr);
    EXPECT_EQ(searches.choose(199, true), many);
    EXPECT_EQ(searches.next_measurement(), nullptr);
  }
}

}  // namespace
}  // namespace mk::kernels
