// The roles of GEMM+Combine as a discrete-event simulation (support/simulation.h): whatever the
// routing, every launch ends and every token of every rank has the sum of its own rows, in every
// world, in adversarial orders. Products are small numbers that any stale or half-written element
// changes.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <random>
#include <string>
#include <vector>

#include "kernels/ops/combine/run_role.h"
#include "kernels/ops/combine/spec.h"
#include "tests/kernels/combine/sim_executors.h"
#include "tests/kernels/support/interleaving_tests.h"
#include "tests/kernels/support/reference.h"
#include "tests/kernels/support/simulation.h"

namespace mk::kernels::testing {
namespace {

struct CombineSimOptions : SimOptions {
  CombineShape shape = {6, 16, 8, 5, 3, CombinePartials::kElement};
  Tiling tiling = {8, 8, 64, 2};
  std::uint32_t steps = 16;
  bool faults = false;          ///< in every third launch some rank's handle does not fit
  bool groups = false;          ///< as a GPU's groups do it
  bool nonsense = false;        ///< likewise, but it makes no sense
  bool forge_releases = false;  ///< the one bank looks released for ever
  bool forge_tiles = false;     ///< all product rows look complete
  /// Ranks have one token each but in the first two launches and the last two, which have all.
  bool few_tokens_between = false;
};

class CombineSimulation : private SimOperator {
 public:
  explicit CombineSimulation(const CombineSimOptions& options)
      : options_(options),
        plan_(plan_or_throw(CombinePlan::make(options.nodes, options.locals, options.shape,
                                              DType::kBf16, options.tiling, options.steps))),
        ranks_(options.nodes * options.locals),
        simulation_(*this, options, plan_.workspace_bytes(), plan_.flag_count()) {
    for (CombineRank& rank : ranks_) {
      rank.launch.plan = plan_;
      rank.launch.banks = plan_.banks;
      rank.launch.blocks = options_.blocks;
    }
    if (options.forge_releases) forge_releases();
  }

  std::string run() { return simulation_.run(); }
  bool saw_wrong_element() const { return simulation_.saw_wrong_element(); }
  std::uint32_t sums_before_products() const {
    std::uint32_t all = 0;
    for (const CombineRank& rank : ranks_) all += rank.sums_before_products;
    return all;
  }
  std::uint32_t faults_named() const { return faults_named_; }

 private:
  const char* name() const override { return "gemm_combine"; }
  Launch& launch(std::uint32_t rank) override { return ranks_[rank].launch; }
  std::vector<RoleThread> threads(const World& world) const override {
    return gemm_combine::threads_of(options_.blocks, world);
  }

  std::vector<RankRouting> routing(std::uint32_t epoch) const {
    std::mt19937_64 random(options_.seed * 1009 + epoch);
    const Skew skew = kSkews[random() % std::size(kSkews)];
    if (options_.few_tokens_between) {
      const bool all = epoch <= 2 || epoch + 1 >= options_.launches.size();
      return draw_routing(options_.nodes * options_.locals, plan_.shape.experts, plan_.shape.top_k,
                          all ? plan_.shape.tokens_max : 1, Skew::kUniform, false, random);
    }
    return draw_routing(options_.nodes * options_.locals, plan_.shape.experts, plan_.shape.top_k,
                        plan_.shape.tokens_max, skew, random() % 4 != 0, random);
  }
  /// The rank whose handle does not fit in that launch, and how; or no rank.
  Fault fault_of(std::uint32_t epoch, std::uint32_t* rank) const {
    *rank = static_cast<std::uint32_t>((options_.seed + epoch) % ranks_.size());
    if (!options_.faults || epoch % 3 != 2) return Fault::kNone;
    if (options_.nonsense) {
      constexpr Fault kAll[] = {Fault::kOffset, Fault::kRow, Fault::kId};
      return kAll[(options_.seed + epoch / 3) % std::size(kAll)];
    }
    return (options_.seed + epoch / 3) % 2 == 0 ? Fault::kIncomplete : Fault::kRowMissing;
  }

  void begin(std::uint32_t index) override {
    CombineRank& rank = ranks_[index];
    CombineLaunch& launch = rank.launch;
    const auto all = routing(launch.epoch);
    rank.routing = all[index];
    std::mt19937_64 random(options_.seed + launch.epoch * 64 + index);
    rank.handle = draw_handle(all, plan_.shape.experts, plan_.shape.top_k, index, random);
    std::uint32_t faulty = 0;
    const Fault fault = fault_of(launch.epoch, &faulty);
    rank.fault = faulty == index ? fault : Fault::kNone;
    launch.complete = rank.fault != Fault::kIncomplete;
    // The last row of the last expert that has any.
    if (rank.fault == Fault::kRowMissing && !rank.handle.rows.empty()) {
      const auto rows = static_cast<std::uint32_t>(rank.handle.rows.size());
      for (std::uint32_t& offset : rank.handle.offsets) offset = std::min(offset, rows - 1);
    }
    spoil(rank, random);
    launch.rows = rank.handle.rows.data();
    launch.room = static_cast<std::uint32_t>(rank.handle.rows.size());
    launch.offsets = rank.handle.offsets.data();
    launch.routing = rank.routing.table(plan_.shape.top_k);
    rank.out.assign(std::size_t{rank.routing.tokens} * plan_.shape.hidden, kPoison);
    if (options_.forge_tiles) forge_tiles(launch);
  }
  /// Only where there is something.
  static void spoil(CombineRank& rank, std::mt19937_64& random) {
    const auto below = [&](std::size_t end) { return static_cast<std::size_t>(random() % end); };
    Handle& handle = rank.handle;
    if (rank.fault == Fault::kOffset && !handle.rows.empty())
      handle.offsets[below(handle.offsets.size() - 1)] = 0xfffffff0;
    if (rank.fault == Fault::kRow && !handle.rows.empty()) {
      MoeRow& row = handle.rows[below(handle.rows.size())];
      (below(3) == 0 ? row.rank : below(2) == 0 ? row.token : row.slot) = 0xfffffff0;
    }
    if (rank.fault == Fault::kId && !rank.routing.ids.empty())
      rank.routing.ids[below(rank.routing.ids.size())] = below(2) == 0 ? -2 : 0x7fffffff;
  }
  bool run_role(std::uint32_t index, Role role, std::uint32_t block_index, BlockTotals& totals,
                const SimExecutor& frame) override {
    if (options_.groups) return run_as<GroupExecutor>(index, role, block_index, totals, frame);
    return run_as<Executor>(index, role, block_index, totals, frame);
  }
  template <class AnyExecutor>
  bool run_as(std::uint32_t index, Role role, std::uint32_t block_index, BlockTotals& totals,
              const SimExecutor& frame) {
    AnyExecutor executor(frame, ranks_[index]);
    CombineBlock<AnyExecutor> block(executor, ranks_[index].launch, role, block_index, totals);
    return gemm_combine::run_role(block, role);
  }

  std::string check(std::uint32_t index) override {
    const CombineRank& rank = ranks_[index];
    const CombineLaunch& launch = rank.launch;
    const auto* words = reinterpret_cast<const CombineWords*>(
        launch.context.workspaces[launch.context.world.local] + plan_.layout.words);
    const std::string wrong = check_verdict(index, words->verdict);
    if (!wrong.empty()) return wrong;
    const bool stored = words->verdict.bad_rank == 0;
    faults_named_ += stored ? 0 : 1;
    if (stored && plan_.steps == 1 && plan_.nodes == 1 && !sums_by_lateness(launch))
      return "tokens that are complete late are summed before others";
    const std::uint32_t hidden = plan_.shape.hidden;
    for (std::uint32_t token = 0; token < rank.routing.tokens; ++token) {
      for (std::uint32_t column = 0; column < hidden; ++column) {
        int expected = 0;
        for (std::uint32_t slot = 0; slot < plan_.shape.top_k; ++slot) {
          if (rank.routing.ids[std::size_t{token} * plan_.shape.top_k + slot] >= 0)
            expected += product(launch.epoch, {index, token, slot, 0}, column);
        }
        const std::uint16_t got = rank.out[std::size_t{token} * hidden + column];
        if (!stored && got != kPoison) return "something was stored although a handle does not fit";
        if (stored && to_double(DType::kBf16, got) != expected)
          return fmt::format("[{}][{}] is {}, expected {}", token, column,
                             to_double(DType::kBf16, got), expected);
      }
    }
    return {};
  }
  /// No token comes before one whose rows leave twice the share of the tiles to compute. A
  /// share is of the local rank that computes the row.
  bool sums_by_lateness(const CombineLaunch& launch) const {
    const World& world = launch.context.world;
    const CombineSchedule schedule(plan_, world);
    const auto at = [&](std::uint32_t local, std::uint64_t offset) {
      return launch.context.workspaces[local] + offset;
    };
    const auto* order =
        reinterpret_cast<const std::uint32_t*>(at(world.local, schedule.list(world.node)));
    double least = 1;
    for (std::uint32_t i = 0; i < launch.routing.tokens; ++i) {
      const auto* entries = reinterpret_cast<const CombineEntry*>(
          at(world.local, schedule.entry(world.node, order[i], 0)));
      double left = 1;
      for (std::uint32_t slot = 0; slot < plan_.shape.top_k; ++slot) {
        if (entries[slot].epoch != launch.epoch) continue;
        const std::uint32_t local = entries[slot].flag / plan_.tiles_max;
        const double tiles =
            reinterpret_cast<const CombineWords*>(at(local, plan_.layout.words))->tiles;
        left = std::min(left, (tiles - entries[slot].flag % plan_.tiles_max) / tiles);
      }
      // Smaller parts are one class.
      left = std::max(left, 1.0 / 128);
      if (left >= 2 * least) return false;
      least = std::min(least, left);
    }
    return true;
  }
  /// A rank without rows, or whose handle makes no sense, is named by all; one that lacks a row by
  /// that row's rank; one whose id is no expert's by itself.
  std::string check_verdict(std::uint32_t index, const CombineVerdict& verdict) const {
    std::uint32_t faulty = 0;
    const Fault fault = fault_of(ranks_[index].launch.epoch, &faulty);
    const std::uint32_t epoch = ranks_[index].launch.epoch;
    const auto all = routing(epoch);
    std::mt19937_64 random(options_.seed + epoch * 64 + faulty);
    const Handle whole = draw_handle(all, plan_.shape.experts, plan_.shape.top_k, faulty, random);
    const bool some = !whole.rows.empty();
    const bool incomplete =
        fault == Fault::kIncomplete || ((fault == Fault::kOffset || fault == Fault::kRow) && some);
    const bool named = incomplete ||
                       (fault == Fault::kRowMissing && some && whole.rows.back().rank == index) ||
                       (fault == Fault::kId && index == faulty && !all[faulty].ids.empty());
    const std::uint32_t expected = named ? faulty + 1 : 0;
    if (verdict.bad_rank != expected || (verdict.incomplete != 0) != incomplete)
      return fmt::format("the verdict is rank {} - 1, incomplete {}; expected rank {} - 1",
                         verdict.bad_rank, verdict.incomplete, expected);
    return {};
  }

  void forge_releases() {
    const FlagMap flags = plan_.flags();
    for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) {
      const std::uint32_t node = rank / plan_.locals;
      for (std::uint32_t from = 0; from < plan_.nodes; ++from) {
        if (from != node) simulation_.forge_flag(rank, flags.release(node, from));
      }
    }
  }
  void forge_tiles(const CombineLaunch& launch) const {
    auto* flags = reinterpret_cast<std::uint32_t*>(
        launch.context.workspaces[launch.context.world.local] + plan_.layout.tile_ready);
    std::fill(flags, flags + std::size_t{plan_.locals} * plan_.tiles_max, kForged);
  }

  static constexpr std::uint16_t kPoison = 0x7fff;
  CombineSimOptions options_;
  CombinePlan plan_;
  std::vector<CombineRank> ranks_;
  std::uint32_t faults_named_ = 0;
  Simulation simulation_;
};

/// Shape, tiles, chunks and blocks by the seed.
void draw(CombineSimOptions& options) {
  std::mt19937_64 random(options.seed);
  const auto from_to = [&](std::uint32_t first, std::uint32_t last) {
    return static_cast<std::uint32_t>(first + random() % (last - first + 1));
  };
  options.shape.tokens_max = from_to(1, 20);
  options.shape.hidden = 8 * from_to(1, 3);
  options.shape.experts = from_to(1, 40);
  options.shape.top_k = from_to(1, std::min(options.shape.experts, 3u));
  options.shape.partials = random() % 2 == 0 ? CombinePartials::kElement : CombinePartials::kF32;
  options.tiling.chunk_bytes = from_to(16, 200);
  const auto blocks = [&] { return from_to(1, 2); };
  options.blocks = {blocks(), blocks(), blocks(), blocks(), 1, 1, blocks()};
  options.steps = random() % 2 == 0 ? 1 : 16;
}

TEST_P(EveryWorldAndOrder, EndsAndIsRight) {
  for_every_world_and_order<CombineSimOptions>(
      GetParam(), [](CombineSimOptions& options, std::uint32_t banks, std::mt19937_64&) {
        if (is_left_out(options)) return;
        options.tiling.banks = banks;
        draw(options);
        options.faults = options.locals % 2 == 0;
        options.launches = random_sim_launches_of(kCombineM, 4, options.seed);
        ASSERT_EQ(CombineSimulation(options).run(), "");
      });
}
INSTANTIATE_TEST_SUITE_P(Nodes, EveryWorldAndOrder, ::testing::Values(1u, 2u, 3u, 4u));

CombineSimOptions small(std::uint32_t nodes, std::uint32_t locals, std::uint64_t seed) {
  return small_world<CombineSimOptions>(nodes, locals, random_sim_launches_of(kCombineM, 6, seed),
                                        seed);
}

TEST(CombineInterleaving, ManySeeds) {
  for (std::uint64_t seed = 1; seed <= 120; ++seed) {
    CombineSimOptions options = small(static_cast<std::uint32_t>(1 + seed % 3),
                                      static_cast<std::uint32_t>(1 + seed / 3 % 3), seed);
    options.tiling.banks = static_cast<std::uint32_t>(1 + seed / 2 % 2);
    draw(options);
    options.groups = seed % 12 == 3;
    ASSERT_EQ(CombineSimulation(options).run(), "") << "seed " << seed;
  }
}

/// Counts the faults that ranks named in 60 right runs with faults that `set(options)` makes.
template <class Set>
std::uint32_t named_in_60(Set&& set) {
  std::uint32_t named = 0;
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    CombineSimOptions options = small(static_cast<std::uint32_t>(1 + seed % 3),
                                      static_cast<std::uint32_t>(1 + seed / 3 % 3), seed);
    options.faults = true;
    set(options);
    CombineSimulation simulation(options);
    EXPECT_EQ(simulation.run(), "") << "seed " << seed;
    named += simulation.faults_named();
  }
  return named;
}

// A handle whose offsets or rows make no sense, and ids that are no experts', where nobody looked
// at them before: named, and nothing is read or stored outside. The launches after them are right.
TEST(CombineInterleaving, WhatMakesNoSenseIsNamedAndDisturbsNoLaterLaunch) {
  const auto nonsense = [](CombineSimOptions& options) {
    options.shape.tokens_max = 20;
    options.groups = options.seed % 6 == 0;
    options.nonsense = true;
  };
  EXPECT_GT(named_in_60(nonsense), 150u);
}

// All ranks hear of a rank that has no rows, and its rank of a row that is missing. Nothing is
// stored there, and the launches after it are right.
TEST(CombineInterleaving, HandlesThatDoNotFitAreNamedAndDisturbNoLaterLaunch) {
  const auto unfit = [](CombineSimOptions& options) {
    options.tiling.banks = static_cast<std::uint32_t>(1 + options.seed / 2 % 2);
  };
  EXPECT_GT(named_in_60(unfit), 150u);
}

TEST(CombineInterleaving, FusedLaunchesOverlapAndUnfusedOnesDoNot) {
  const auto options_of = [](std::uint64_t seed) {
    CombineSimOptions options = small(2, 2, seed);
    options.shape.tokens_max = 30;
    return options;
  };
  expect_only_fused_overlap(options_of, &CombineSimulation::sums_before_products);
}

/// In how many of 60 runs a wrong element was seen.
int wrong_of_60(std::uint32_t nodes, std::uint32_t locals, const CombineSimOptions& faults) {
  return seeds_seen_wrong<CombineSimulation>(60, [&](std::uint64_t seed) {
    CombineSimOptions options = small(nodes, locals, seed);
    options.tiling = {8, 8, 128, 1};
    options.forge_releases = faults.forge_releases;
    options.forge_tiles = faults.forge_tiles;
    options.network = faults.network;
    return options;
  });
}

// With one bank, the release is all that keeps a rank from overwriting what its peer still reads.
// If that went unnoticed, the tests above would prove nothing about reuse.
TEST(CombineInterleaving, AReceiveBankReusedTooEarlyIsSeen) {
  CombineSimOptions faults;
  faults.forge_releases = true;
  faults.network.keep_forged_flags = true;
  EXPECT_GT(wrong_of_60(2, 1, faults), 5);
}

TEST(CombineInterleaving, AFlagBeforeItsDataIsSeen) {
  CombineSimOptions faults;
  faults.network.flags_first = true;
  EXPECT_GT(wrong_of_60(2, 2, faults), 5);
}

TEST(CombineInterleaving, AStagingBankReusedTooEarlyIsSeen) {
  CombineSimOptions faults;
  faults.network.complete_early = true;
  EXPECT_GT(wrong_of_60(3, 1, faults), 5);
}

TEST(CombineInterleaving, ARowSummedBeforeItIsHereIsSeen) {
  CombineSimOptions faults;
  faults.forge_tiles = true;
  EXPECT_GT(wrong_of_60(1, 3, faults), 20);
}

// More chunks than a granule has flags, most launches with few of them: the granules that those do
// not reach must not fall out of the window in which an immediate's ten bits name the epoch.
TEST(CombineInterleaving, IdleFlagGranulesStayWithinTheEpochWindow) {
  CombineSimOptions options;
  options.nodes = 2;
  options.shape = {140, 8, 8, 2, 2, CombinePartials::kElement};
  options.few_tokens_between = true;
  options.tiling = {8, 8, 1, 2};
  options.network.immediates = true;
  options.order = Order::kRandom;
  options.launches.assign(1300, {kCombineM, Mode::kFused});
  EXPECT_EQ(CombineSimulation(options).run(), "");
}

}  // namespace
}  // namespace mk::kernels::testing
