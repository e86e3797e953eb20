// The search for a launch's partition, over launches whose times are computed.
#include "kernels/comm/partition_search.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

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

// --- Operators whose roles come one after the other, or whose SMs change them ---

constexpr std::uint32_t kGroups = 3;  // of an SM

double waves(double tiles, double sms) { return std::ceil(tiles / sms - 1e-9); }

/// Ring Attention over nodes: a watcher, a send group and the poller are among the first SM's.
Model ring_over_nodes(double items, double share, double link) {
  constexpr double kItem = 1e6;
  return [=](std::uint32_t target) {
    const double compute = waves(items, kAll - target) * kItem;
    const double all = items / kAll * kItem;
    const double shared = share * all * 12 / (kGroups * target - 3);
    return 3e4 + std::max({compute, shared, link * all}) + 0.1 * std::min(compute, shared);
  };
}
/// On one node SMs that have shared all compute, too.
Model ring_on_a_node(double items, double share) {
  constexpr double kItem = 1e6;
  return [=](std::uint32_t target) {
    const double shared = share * kItem * kAll / (kGroups * target - 2);
    const double before = (kAll - target) * shared / kItem;
    if (before >= items) return 2e4 + std::max(shared, waves(items, kAll - target) * kItem);
    return 2e4 + shared + waves(items - before, kAll) * kItem;
  };
}
/// MoE Dispatch+GEMM: half of the groups plan, all pack tokens, and tiles wait for both. `skew`:
/// this rank's tiles over those of even routing.
Model moe_dispatch(double tiles, double pack, double plan, double skew = 1) {
  constexpr double kTile = 6e4;
  return [=](std::uint32_t target) {
    const double groups = kGroups * target - 1;
    const double planned = 1.5e4 + plan / std::clamp(groups / 2, 1.0, 24.0);
    const double packed = pack * skew * tiles / kAll * kTile * 36 / groups;
    const double compute = waves(skew * tiles, kAll - target) * kTile;
    return planned + std::max(compute + 0.15 * packed, packed + kTile);
  };
}
/// GEMM+Combine: groups make the index, and sum beside the product. When that is done, all sum.
Model combine(double tiles, double sums, double index, double skew = 1) {
  constexpr double kTile = 6e4;
  return [=](std::uint32_t target) {
    const double groups = kGroups * target - 1;
    const double compute = waves(skew * tiles, kAll - target) * kTile;
    const double work = sums * tiles / kAll * kTile * 36;
    const double left = std::max(0.1 * work, work - 0.9 * groups * compute);
    return 1.5e4 + index / std::min(groups, 48.0) + compute +
           left / (groups + kGroups * (kAll - target));
  };
}

struct Named {
  std::string name;
  Model model;
};
std::vector<Named> operators() {
  std::vector<Named> all;
  const auto add = [&](const char* name, double a, double b, double c, Model model) {
    all.push_back(
        {name + (" " + std::to_string(a)) + " " + std::to_string(b) + " " + std::to_string(c),
         std::move(model)});
  };
  for (const double items : {300.0, 700.0, 3000.0}) {
    for (const double share : {0.05, 0.3, 1.0}) {
      add("ring", items, share, 0, ring_on_a_node(items, share));
      for (const double link : {0.0, 0.5})
        add("ring over nodes", items, share, link, ring_over_nodes(items, share, link));
    }
  }
  for (const double tiles : {100.0, 260.0, 900.0, 4000.0}) {
    for (const double begin : {2e4, 2e5}) {
      for (const double pack : {0.05, 0.2, 0.6})
        add("moe", tiles, pack, begin, moe_dispatch(tiles, pack, begin));
      for (const double sums : {0.1, 0.5, 1.0})
        add("combine", tiles, sums, begin, combine(tiles, sums, begin));
    }
  }
  return all;
}
constexpr std::uint32_t kLeast = 2;  // Ring Attention's
std::uint32_t best_target(const Model& model) {
  std::uint32_t best = kLeast;
  for (std::uint32_t target = best + 1; target <= kMost; ++target) {
    if (model(target) < model(best)) best = target;
  }
  return best;
}
/// Three launches that differ by up to `noise`: the least, and the next one's distance.
void measure(PartitionSearch& search, const Model& model, double noise, std::mt19937_64& random) {
  std::uniform_real_distribution<double> more(0, noise);
  std::array<double, 3> ns{};
  for (double& one : ns) one = model(search.target()) * (1 + more(random));
  std::sort(ns.begin(), ns.end());
  search.measured(static_cast<std::uint64_t>(ns[0]), static_cast<std::uint64_t>(ns[1] - ns[0]));
}
std::uint32_t settle_with(PartitionSearch& search, const Model& model, double noise,
                          std::mt19937_64& random) {
  std::uint32_t measured = 0;
  do {
    measure(search, model, noise, random);
    ++measured;
  } while (!search.settled() && measured < 200);
  return measured;
}

TEST(PartitionSearch, IsAsGoodAsTheBestSplitOfOperatorsWhoseRolesFollowEachOther) {
  std::mt19937_64 random{std::random_device{}()};
  for (const double noise : {0.0, 0.02}) {
    double log_sum[3] = {};
    int cases = 0;
    for (const Named& one : operators()) {
      const std::uint32_t best = best_target(one.model);
      const std::uint32_t starts[] = {best, std::max(kLeast, best / 4), std::min(kMost, 4 * best)};
      for (int i = 0; i < 3; ++i) {
        SCOPED_TRACE(one.name + " from " + std::to_string(starts[i]) + ", best " +
                     std::to_string(best));
        PartitionSearch search(kLeast, kMost, starts[i]);
        EXPECT_LE(settle_with(search, one.model, noise, random), 24u);
        const double ratio = one.model(search.best()) / one.model(best);
        EXPECT_LE(ratio, i == 0 ? 1.03 : 1.35);
        log_sum[i] += std::log(ratio);
      }
      ++cases;
    }
    EXPECT_LE(std::exp(log_sum[0] / cases), 1.01) << noise;
    EXPECT_LE(std::exp(log_sum[1] / cases), 1.03) << noise;
    EXPECT_LE(std::exp(log_sum[2] / cases), 1.03) << noise;
  }
}

/// 100 tiles are one wave of 115 SMs and two of 64 to 98: fewer that communicate gain nothing
/// before they save the wave.
TEST(PartitionSearch, LooksBehindNumbersThatChangeNothing) {
  const Model model = combine(100, 0.1, 2e4);
  PartitionSearch search(1, kMost, 68);
  settle(search, model);
  EXPECT_LE(model(search.best()), 1.03 * best_of(model));
}

/// Tokens choose experts unevenly: this rank has three times as many tiles as planned, or a third.
TEST(PartitionSearch, GainsWhereRoutingIsNotAsPlanned) {
  std::mt19937_64 random{std::random_device{}()};
  int matters = 0;
  double log_gain = 0;
  for (const double tiles : {260.0, 900.0, 4000.0}) {
    for (const double begin : {2e4, 2e5}) {
      for (const double share : {0.2, 0.6, 1.5}) {
        for (const double skew : {3.0, 1.0 / 3}) {
          for (const bool dispatches : {true, false}) {
            const Model even =
                dispatches ? moe_dispatch(tiles, share, begin) : combine(tiles, 4 * share, begin);
            const Model is = dispatches ? moe_dispatch(tiles, share, begin, skew)
                                        : combine(tiles, 4 * share, begin, skew);
            const std::uint32_t planned = best_target(even);
            PartitionSearch search(kLeast, kMost, planned);
            settle_with(search, is, 0.02, random);
            const double gain = is(planned) / is(search.best());
            SCOPED_TRACE(testing::Message() << tiles << " " << begin << " " << share << " " << skew
                                            << (dispatches ? " dispatch" : " combine"));
            if (is(planned) >= 1.15 * is(best_target(is))) {
              ++matters;
              log_gain += std::log(gain);
              EXPECT_GE(gain, 1.08);
            } else {
              EXPECT_GE(gain, 0.97);
            }
          }
        }
      }
    }
  }
  ASSERT_GE(matters, 4);
  EXPECT_GE(std::exp(log_gain / matters), 1.1);
}

/// A rail has a third of its rate from some launch on: sharing is not to blame, and moves nothing.
TEST(PartitionSearch, ASlowRailCostsNothing) {
  std::mt19937_64 random{std::random_device{}()};
  for (const double share : {0.05, 0.3, 1.0}) {
    const Model before = ring_over_nodes(700, share, 0.9);
    const Model after = ring_over_nodes(700, share, 2.7);
    PartitionSearch search(kLeast, kMost, best_target(before));
    settle_with(search, before, 0.02, random);
    for (int look = 0; look < 40; ++look) measure(search, after, 0.02, random);
    EXPECT_LE(after(search.best()), 1.03 * after(best_target(after))) << share;
  }
}

/// Routing is another in each launch: their times differ by a fifth whatever the partition is.
TEST(PartitionSearch, LosesLittleWhereLaunchesDiffer) {
  std::mt19937_64 random{std::random_device{}()};
  double log_sum = 0;
  int cases = 0;
  for (const Named& one : operators()) {
    if (!one.name.starts_with("moe") && !one.name.starts_with("combine")) continue;
    const std::uint32_t best = best_target(one.model);
    PartitionSearch search(kLeast, kMost, best);
    // Windows of four launches, and sixty between two of a settled search.
    double spent = 0;
    double launches = 0;
    for (int look = 0; look < 300; ++look) {
      const double count = look > 0 && search.settled() ? 64 : 4;
      spent += count * one.model(search.target());
      launches += count;
      measure(search, one.model, 0.2, random);
    }
    log_sum += std::log(spent / launches / one.model(best));
    ++cases;
  }
  EXPECT_LE(std::exp(log_sum / cases), 1.03);
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

TEST(PartitionSearch, IsSharedByAlikeCounts) {
  EXPECT_EQ(alike_count(0), 1u);
  for (std::uint32_t count = 1; count < 5000; ++count) {
    const std::uint32_t alike = alike_count(count);
    EXPECT_LE(alike, count);
    EXPECT_LT(count, 1.25 * alike + 1);
    EXPECT_EQ(alike_count(alike), alike);
  }
  EXPECT_EQ(alike_count(~0u), 7u << 29);
}

}  // namespace
}  // namespace mk::kernels
