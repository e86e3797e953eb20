/// \file
/// Which rail serves a session: in turn, away from others' sessions, near its GPU.

#include "daemon/control/rail_choice.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

namespace mk::daemon::control {
namespace {

using Numbers = std::vector<std::uint32_t>;

/// The rails of a job's ranks, attached in that order.
Numbers place_job(Numbers& load, const Numbers& order) {
  Numbers rails(order.size());
  std::optional<std::uint32_t> first;
  for (const std::uint32_t local : order) {
    const RailChoice choice = choose_rail({.local_rank = local,
                                           .local_size = static_cast<std::uint32_t>(order.size()),
                                           .load = load,
                                           .near = {},
                                           .first = first});
    first = choice.first;
    rails[local] = choice.rail;
    ++load[choice.rail];
  }
  return rails;
}
Numbers in_order(std::uint32_t ranks) {
  Numbers order(ranks);
  std::iota(order.begin(), order.end(), 0);
  return order;
}

TEST(RailChoice, OfALoneJobIsByLocalRank) {
  for (std::uint32_t rails = 1; rails <= 8; ++rails) {
    for (std::uint32_t ranks = 1; ranks <= 16; ++ranks) {
      Numbers load(rails, 0);
      const Numbers chosen = place_job(load, in_order(ranks));
      for (std::uint32_t local = 0; local < ranks; ++local) EXPECT_EQ(local % rails, chosen[local]);
    }
  }
}

TEST(RailChoice, OfASecondJobIsAwayFromTheFirst) {
  Numbers load(4, 0);
  EXPECT_EQ((Numbers{0, 1}), place_job(load, in_order(2)));
  EXPECT_EQ((Numbers{2, 3}), place_job(load, in_order(2)));
  EXPECT_EQ((Numbers{0, 1, 2}), place_job(load, in_order(3)));
  EXPECT_EQ((Numbers{3}), place_job(load, in_order(1)));
}

// Two nodes choose alike though the ranks of a job come in different orders there.
TEST(RailChoice, DoesNotDependOnTheOrderInWhichRanksCome) {
  std::mt19937 random(7);
  for (int run = 0; run < 200; ++run) {
    const auto rails = 1 + static_cast<std::uint32_t>(random() % 8);
    Numbers here(rails, 0), there(rails, 0);
    for (int job = 0; job < 5; ++job) {
      Numbers order = in_order(1 + static_cast<std::uint32_t>(random() % 9));
      const Numbers chosen = place_job(here, order);
      std::ranges::shuffle(order, random);
      EXPECT_EQ(chosen, place_job(there, order));
    }
    EXPECT_EQ(here, there);
  }
}

// Jobs of one rank spread evenly, and no rail is used twice before all are once.
TEST(RailChoice, SpreadsSmallJobsEvenly) {
  Numbers load(5, 0);
  for (int job = 0; job < 23; ++job) {
    (void)place_job(load, in_order(1));
    const auto [least, most] = std::ranges::minmax(load);
    EXPECT_LE(most - least, 1u);
  }
}

TEST(RailChoice, IsTheLeastLoadedOfTheRailsNearTheGpu) {
  const Numbers load{0, 3, 1, 1, 0};
  const auto chosen = [&](const Numbers& near) {
    return choose_rail({.local_rank = 3, .local_size = 4, .load = load, .near = near, .first = 2});
  };
  EXPECT_EQ(1u, chosen({1}).rail) << "near, though it is used by others";
  EXPECT_EQ(2u, chosen({1, 2, 3}).rail) << "the first of equals";
  EXPECT_EQ(4u, chosen({1, 3, 4}).rail);
  EXPECT_EQ(std::nullopt, chosen({1}).first) << "the job's other ranks are not placed by this one";
}

}  // namespace
}  // namespace mk::daemon::control
