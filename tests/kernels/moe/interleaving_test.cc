// The roles of MoE Dispatch+GEMM as a discrete-event simulation (support/simulation.h): whatever
// the routing, every launch ends and every row of every rank is the right token's, in every world,
// in adversarial orders. The product is replaced by something that any stale or half-written
// element changes.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels/ops/moe/roles.h"
#include "kernels/ops/moe/spec.h"
#include "tests/kernels/moe/routing_cases.h"
#include "tests/kernels/moe/run_role.h"
#include "tests/kernels/support/engine_actor.h"
#include "tests/kernels/support/interleaving_tests.h"
#include "tests/kernels/support/simulation.h"

namespace mk::kernels::testing {
namespace {

struct MoeSimOptions : SimOptions {
  MoeDispatchShape shape = {6, 24, 16, 5, 2, 0};
  Tiling tiling = {8, 8, 64, 2};
  MoeDispatchWay way;
  bool forge_releases = false;  ///< the one bank looks released for ever
  EngineFault engine_fault = EngineFault::kNone;
  std::uint64_t engine_bytes = 1;  ///< that engines bring at a time
  /// Rows that a rank has room for in a launch, of `needed`.
  std::function<std::uint32_t(std::uint32_t needed)> room = [](std::uint32_t needed) {
    return needed;
  };
};

/// An element of a token.
std::uint16_t element(std::uint32_t rank, std::uint32_t epoch, std::uint32_t token,
                      std::uint32_t column) {
  std::uint32_t hash = rank * 0x9e3779b1u ^ epoch * 0x85ebca6bu ^ token * 0xc2b2ae35u ^ column * 7u;
  hash ^= hash >> 15;
  hash *= 0x2c1b3c6du;
  return static_cast<std::uint16_t>(hash >> 16);
}

/// In the place of a product: what a row of expert `expert` has in column `column`.
std::uint16_t product(const std::uint16_t* token, std::uint32_t hidden, std::uint32_t expert,
                      std::uint32_t column) {
  std::uint32_t hash = expert * 131 + column;
  for (std::uint32_t i = 0; i < hidden; ++i) hash = hash * 31 + token[i];
  return static_cast<std::uint16_t>(hash ^ hash >> 16);
}

struct MoeRank {
  MoeDispatchLaunch launch;
  RankRouting routing;
  std::vector<std::uint16_t> tokens;
  std::vector<std::uint16_t> y;
  std::uint32_t engine_starts = 0;
  std::uint32_t tiles_before_pulled = 0;  ///< computed before all rows were packed
  std::uint64_t produced_before = 0;      ///< commands, when the launch began
  std::uint64_t routing_commands = 0;     ///< of the launch, those that carry routing

  std::uint64_t produced() const {
    std::uint64_t sum = 0;
    for (std::uint32_t lane = 0; lane < launch.blocks.send; ++lane)
      sum += launch.context.lanes[lane].produced;
    return sum;
  }
};

class Executor : public SimExecutor {
 public:
  Executor(const SimExecutor& frame, MoeRank& rank) : SimExecutor(frame), rank_(rank) {}

  void copy(const CopyJob& job) { copy_in_pieces(job, 24); }
  void start_dma(std::uint32_t, std::uint32_t) {
    maybe_yield();
    ++rank_.engine_starts;
  }
  /// Others in each launch.
  template <class Block>
  static std::uint32_t pack_parts(const Block& block) {
    std::uint32_t parts = 1u << (block.epoch + block.world.rank()) % 4;
    while (parts > block.launch.blocks.pull) parts /= 2;
    return parts;
  }
  bool multiply(const RowTile& tile, std::uint32_t packed_rows, const TileRect& columns,
                const std::byte* packed) {
    const MoeDispatchShape& shape = rank_.launch.plan.shape;
    if (packed_rows < tile.rows || packed_rows % rank_.launch.plan.row_pad != 0) return false;
    const LocalWords& local = *rank_.launch.local;
    const std::uint32_t* pulled = local.done[static_cast<std::uint32_t>(Role::kPull)];
    rank_.tiles_before_pulled += pulled[0] != rank_.launch.epoch;
    const auto* x = reinterpret_cast<const std::uint16_t*>(packed);
    for (std::uint32_t row = 0; row < tile.rows; ++row) {
      for (std::uint32_t column = columns.column; column < columns.column + columns.columns;
           ++column) {
        std::uint16_t& to = rank_.y[std::size_t{tile.row + row} * shape.features + column];
        if (to != 0) return false;  // twice
        to = static_cast<std::uint16_t>(
            product(x + std::size_t{row} * shape.hidden, shape.hidden, tile.expert, column) | 1);
      }
      maybe_yield();
    }
    return true;
  }

 private:
  MoeRank& rank_;
};

class MoeSimulation : private SimOperator {
 public:
  explicit MoeSimulation(const MoeSimOptions& options)
      : options_(options),
        plan_(make_plan(options)),
        ranks_(make_ranks()),
        simulation_(*this, options, plan_.workspace_bytes(), plan_.flag_count()) {
    if (options.forge_releases) forge_releases();
  }

  std::string run() { return simulation_.run(); }
  bool saw_wrong_element() const { return simulation_.saw_wrong_element(); }
  std::uint32_t tiles_before_pulled() const {
    std::uint32_t all = 0;
    for (const MoeRank& rank : ranks_) all += rank.tiles_before_pulled;
    return all;
  }
  std::uint32_t overflows() const { return overflows_; }
  std::uint32_t watched() const { return watched_; }

 private:
  static MoeDispatchPlan make_plan(const MoeSimOptions& options) {
    MoeDispatchShape shape = options.shape;
    if (shape.rows_max == 0)  // enough for repeated experts too
      shape.rows_max = options.nodes * options.locals * shape.tokens_max * shape.top_k;
    return plan_or_throw(MoeDispatchPlan::make(options.nodes, options.locals, shape, DType::kBf16,
                                               options.tiling, options.way));
  }
  std::vector<MoeRank> make_ranks() const {
    std::vector<MoeRank> ranks(options_.nodes * options_.locals);
    for (MoeRank& rank : ranks) {
      rank.launch.plan = plan_;
      rank.launch.banks = plan_.banks;
      rank.launch.blocks = options_.blocks;
    }
    return ranks;
  }

  const char* name() const override { return "moe_dispatch"; }
  Launch& launch(std::uint32_t rank) override { return ranks_[rank].launch; }
  std::vector<RoleThread> threads(const World& world) const override {
    const RoleBlocks& blocks = options_.blocks;
    std::vector<RoleThread> threads;
    add_role(threads, Role::kCompute, blocks.compute);
    add_role(threads, Role::kPlan, blocks.plan);
    add_role(threads, Role::kPull, blocks.pull);
    add_gather_roles(threads, world, blocks);
    return threads;
  }

  std::vector<RankRouting> routing(std::uint32_t epoch) const {
    std::mt19937_64 random(options_.seed * 1009 + epoch);
    const Skew skew = kSkews[random() % std::size(kSkews)];
    return draw_routing(options_.nodes * options_.locals, plan_.shape.experts, plan_.shape.top_k,
                        plan_.shape.tokens_max, skew, random() % 4 != 0, random);
  }
  /// The rank's rows by the definition, in any order.
  std::uint32_t needed(std::uint32_t rank, const std::vector<RankRouting>& all) const {
    const ShardRange here = shard_of(plan_.shape.experts, options_.nodes * options_.locals, rank);
    std::uint32_t count = 0;
    for (const RankRouting& one : all) {
      count += static_cast<std::uint32_t>(
          std::count_if(one.ids.begin(), one.ids.end(), [&](std::int32_t id) {
            return id >= static_cast<std::int32_t>(here.first) &&
                   id < static_cast<std::int32_t>(here.first + here.count);
          }));
    }
    return count;
  }

  void begin(std::uint32_t index) override {
    MoeRank& rank = ranks_[index];
    const auto all = routing(rank.launch.epoch);
    rank.routing = all[index];
    const std::uint32_t hidden = plan_.shape.hidden;
    rank.tokens.resize(std::size_t{rank.routing.tokens} * hidden);
    for (std::uint32_t i = 0; i < rank.tokens.size(); ++i)
      rank.tokens[i] = element(index, rank.launch.epoch, i / hidden, i % hidden);
    rank.launch.routing = rank.routing.table(plan_.shape.top_k);
    rank.launch.tokens = reinterpret_cast<const std::byte*>(rank.tokens.data());
    rank.launch.capacity = options_.room(needed(index, all));
    // Ranks may differ in that.
    rank.launch.by_dma = plan_.engines && (rank.launch.epoch + index) % 4 != 0;
    rank.engine_starts = 0;
    rank.y.assign(std::size_t{rank.launch.capacity} * plan_.shape.features, 0);
    rank.produced_before = rank.produced();
    const GatherSchedule gather(plan_.routing, rank.launch.context.world);
    rank.routing_commands = gather.commands([&](std::uint32_t origin) {
      return all[origin].tokens;
    }) - (gather.flags().has_releases() ? 1 : 0);
  }

  /// What a rank has committed in its launch so far.
  enum class Sent { kSomeRouting, kRouting, kTokens };
  static Sent sent(const MoeRank& rank) {
    const std::uint64_t now = rank.produced() - rank.produced_before;
    return now < rank.routing_commands    ? Sent::kSomeRouting
           : now == rank.routing_commands ? Sent::kRouting
                                          : Sent::kTokens;
  }
  /// No token leaves before all routing of the node has.
  void watch(std::uint32_t index) override {
    const MoeRank& rank = ranks_[index];
    if (options_.nodes == 1 || sent(rank) != Sent::kTokens) return;
    const std::uint32_t first = index / options_.locals * options_.locals;
    for (std::uint32_t peer = first; peer < first + options_.locals; ++peer) {
      const MoeRank& other = ranks_[peer];
      if (other.launch.epoch < rank.launch.epoch ||
          (other.launch.epoch == rank.launch.epoch && sent(other) == Sent::kSomeRouting))
        tokens_first_ = true;
    }
    ++watched_;
  }

  bool run_role(std::uint32_t index, Role role, std::uint32_t block_index, BlockTotals& totals,
                const SimExecutor& frame) override {
    Executor executor(frame, ranks_[index]);
    MoeDispatchBlock<Executor> block(executor, ranks_[index].launch, role, block_index, totals);
    return run_moe_dispatch_role(block, role);
  }

  bool run_beside(std::uint32_t index, const SimExecutor& frame) override {
    MoeRank& rank = ranks_[index];
    if (!rank.launch.by_dma) return true;
    Executor executor(frame, rank);
    BlockTotals totals;
    MoeDispatchBlock<Executor> block(executor, rank.launch, Role::kPull, 0, totals);
    const GatherSource tokens = block.own_tokens();
    EngineActor engines(executor, block.tokens, tokens, options_.engine_fault);
    if (!engines.await_start(rank.engine_starts, totals.waits)) return false;
    const bool brought =
        gather::bring_rows(block.schedule.tokens(), tokens.rows, options_.engine_bytes,
                           gather::PieceOrder::kPieceByPiece, engines)
            .has_value();
    engines.bring();
    return brought;
  }

  std::string check(std::uint32_t index) override {
    const MoeRank& rank = ranks_[index];
    if (rank.engine_starts != (rank.launch.by_dma ? 1 : 0))
      return fmt::format("copy engines were started {} times", rank.engine_starts);
    const RoutingPlan plan = routing_plan_of(rank.launch);
    const auto all = routing(rank.launch.epoch);
    const std::uint32_t wanted = needed(index, all);
    if (tokens_first_) return "a rank sent tokens before its node had sent all routing";
    if (plan.summary().rows != wanted)
      return fmt::format("{} rows, expected {}", plan.summary().rows, wanted);
    if (plan.summary().fits != (wanted <= rank.launch.capacity))
      return fmt::format("{} rows and room for {}: fits = {}", wanted, rank.launch.capacity,
                         plan.summary().fits);
    if (plan.summary().fits == 0) {
      ++overflows_;
      const bool stored = std::any_of(rank.y.begin(), rank.y.end(), [](auto v) { return v != 0; });
      return stored ? "something was stored although the rows do not fit" : "";
    }
    for (std::uint32_t expert = 0; expert < plan.experts().count; ++expert) {
      for (std::uint32_t row = plan.offsets()[expert]; row < plan.offsets()[expert + 1]; ++row) {
        std::string wrong = check_row(rank, all, expert, row);
        if (!wrong.empty()) return wrong;
      }
    }
    return {};
  }

  /// That the row is of a token that goes to the expert, and made from its elements. (That it is
  /// the right one of them: routing_plan_test.cc.)
  std::string check_row(const MoeRank& rank, const std::vector<RankRouting>& all,
                        std::uint32_t expert, std::uint32_t row) const {
    const RoutingPlan plan = routing_plan_of(rank.launch);
    const MoeRow& from = plan.rows()[row];
    const std::size_t slot = std::size_t{from.token} * plan_.shape.top_k + from.slot;
    if (all[from.rank].ids[slot] != static_cast<std::int32_t>(plan.experts().first + expert) ||
        all[from.rank].weights[slot] != from.weight)
      return fmt::format("row {} does not belong to expert {}", row, expert);
    std::vector<std::uint16_t> token(plan_.shape.hidden);
    for (std::uint32_t i = 0; i < token.size(); ++i)
      token[i] = element(from.rank, rank.launch.epoch, from.token, i);
    const std::uint32_t features = plan_.shape.features;
    for (std::uint32_t column = 0; column < features; ++column) {
      const std::uint16_t expected = product(token.data(), plan_.shape.hidden, expert, column) | 1;
      if (rank.y[std::size_t{row} * features + column] != expected)
        return fmt::format("[{}][{}] is wrong", row, column);
    }
    return {};
  }

  void forge_releases() {
    for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) {
      const std::uint32_t node = rank / options_.locals;
      const MoeDispatchSchedule schedule(plan_, {options_.nodes, options_.locals, node, 0});
      simulation_.forge_flag(rank, schedule.routing().release(node));
      simulation_.forge_flag(rank, schedule.tokens().release(node));
    }
  }

  MoeSimOptions options_;
  MoeDispatchPlan plan_;
  std::vector<MoeRank> ranks_;
  std::uint32_t overflows_ = 0;
  bool tokens_first_ = false;
  std::uint32_t watched_ = 0;  ///< looks at a rank that had sent tokens
  Simulation simulation_;
};

TEST_P(EveryWorldAndOrder, EndsAndIsRight) {
  for_every_world_and_order<MoeSimOptions>(
      GetParam(), [](MoeSimOptions& options, std::uint32_t banks, std::mt19937_64& random) {
        if (is_left_out(options)) return;
        options.shape.tokens_max = static_cast<std::uint32_t>(1 + random() % 6);
        options.shape.experts = static_cast<std::uint32_t>(2 + random() % 40);
        options.tiling.banks = banks;
        options.way.kind = random() % 2 == 0 ? GatherKind::kPull : GatherKind::kBroadcast;
        options.way.steps = random() % 2 == 0 ? 16 : 1;
        const auto blocks = [&] { return static_cast<std::uint32_t>(1 + random() % 2); };
        options.blocks = {blocks(), 1, blocks(), blocks(), blocks(), blocks(), blocks()};
        options.launches = random_sim_launches_of(kMoeDispatchM, 3, options.seed);
        ASSERT_EQ(MoeSimulation(options).run(), "");
      });
}
INSTANTIATE_TEST_SUITE_P(Nodes, EveryWorldAndOrder, ::testing::Values(1u, 2u, 3u, 4u));

MoeSimOptions small(std::uint32_t nodes, std::uint32_t locals, std::uint64_t seed) {
  return small_world<MoeSimOptions>(nodes, locals, random_sim_launches_of(kMoeDispatchM, 6, seed),
                                    seed);
}

TEST(MoeDispatchInterleaving, ManySeeds) {
  std::uint32_t watched = 0;
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    MoeSimOptions options = small(static_cast<std::uint32_t>(1 + seed % 4),
                                  static_cast<std::uint32_t>(1 + seed % 3), seed);
    options.tiling.banks = static_cast<std::uint32_t>(1 + seed / 2 % 2);
    options.way.kind = seed / 4 % 2 == 0 ? GatherKind::kPull : GatherKind::kBroadcast;
    MoeSimulation simulation(options);
    ASSERT_EQ(simulation.run(), "") << "seed " << seed;
    watched += simulation.watched();
  }
  EXPECT_GT(watched, 60u) << "whether tokens wait for routing was hardly looked at";
}

// A rank whose rows do not fit stores nothing; the others, and the next launches, are right.
TEST(MoeDispatchInterleaving, RanksWithoutRoomDoNotDisturbOthers) {
  std::uint32_t overflows = 0;
  for (std::uint64_t seed = 1; seed <= 30; ++seed) {
    MoeSimOptions options = small(2, 2, seed);
    std::uint32_t turn = 0;
    options.room = [turn](std::uint32_t needed) mutable {
      return needed > 0 && ++turn % 3 == 0 ? needed - 1 : needed;
    };
    MoeSimulation simulation(options);
    ASSERT_EQ(simulation.run(), "") << "seed " << seed;
    overflows += simulation.overflows();
  }
  EXPECT_GT(overflows, 30u);
}

/// With copy engines, on a node or two.
MoeSimOptions with_engines(std::uint64_t seed) {
  MoeSimOptions options = small(static_cast<std::uint32_t>(1 + seed % 2),
                                static_cast<std::uint32_t>(2 + seed / 2 % 3), seed);
  options.shape.tokens_max = static_cast<std::uint32_t>(4 + seed % 9);
  options.way = {GatherKind::kBroadcast, 1, true};
  options.tiling.banks = static_cast<std::uint32_t>(1 + seed / 3 % 2);
  options.engine_bytes = 1 + seed * 7919 % 500;
  return options;
}

// Some of the ranks' engines in each launch, with pieces of any size.
TEST(MoeDispatchInterleaving, EnginesBringTokensWithinTheNode) {
  for (std::uint64_t seed = 1; seed <= 80; ++seed)
    ASSERT_EQ(MoeSimulation(with_engines(seed)).run(), "") << "seed " << seed;
  for (const Order order : kOrders) {
    for (std::uint32_t locals = 2; locals <= 8; ++locals) {
      MoeSimOptions options = with_engines(locals);
      options.locals = locals;
      options.order = order;
      ASSERT_EQ(MoeSimulation(options).run(), "") << locals << " ranks";
    }
  }
}

int wrong_engines_of_60(EngineFault fault) {
  return seeds_seen_wrong<MoeSimulation>(60, [&](std::uint64_t seed) {
    MoeSimOptions options = with_engines(seed);
    options.engine_fault = fault;
    return options;
  });
}

// If engines that do not wait, or show what is not there, went unnoticed, the test above would
// prove nothing.
TEST(MoeDispatchInterleaving, EnginesThatDoNotWaitAreSeen) {
  EXPECT_EQ(wrong_engines_of_60(EngineFault::kNone), 0);
  EXPECT_GT(wrong_engines_of_60(EngineFault::kBeginAtOnce), 20);
  EXPECT_GT(wrong_engines_of_60(EngineFault::kShowFirst), 20);
}

TEST(MoeDispatchInterleaving, FusedLaunchesOverlapAndUnfusedOnesDoNot) {
  const auto options_of = [](std::uint64_t seed) {
    MoeSimOptions options = small(2, 2, seed);
    options.shape.tokens_max = 20;
    return options;
  };
  expect_only_fused_overlap(options_of, &MoeSimulation::tiles_before_pulled);
}

/// In how many of 60 runs a wrong row was seen.
int wrong_of_60(bool forge_releases, const NetworkOptions& network) {
  return seeds_seen_wrong<MoeSimulation>(60, [&](std::uint64_t seed) {
    MoeSimOptions options = small(2, static_cast<std::uint32_t>(1 + seed % 2), seed);
    options.tiling = {8, 8, 128, 1};
    options.forge_releases = forge_releases;
    options.network = network;
    return options;
  });
}

// With one bank, the release is all that keeps a rank from overwriting what its successor and the
// node's ranks still read. If that went unnoticed, the tests above would prove nothing about reuse.
TEST(MoeDispatchInterleaving, ABankReusedTooEarlyIsSeen) {
  EXPECT_GT(wrong_of_60(true, network_with(&NetworkOptions::keep_forged_flags)), 5);
}

TEST(MoeDispatchInterleaving, AFlagBeforeItsDataIsSeen) {
  EXPECT_GT(wrong_of_60(false, network_with(&NetworkOptions::flags_first)), 5);
}

}  // namespace
}  // namespace mk::kernels::testing
