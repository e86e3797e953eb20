// Operators that share a workspace, in adversarial orders: the real turns, in launches whose areas
// lie across each other's. Each launch gives sums to its node, sends over the network, and reads
// what has come at its neighbours. Every word is checked when it is read, and a turn that waits for
// less than it should is seen.

#include "kernels/comm/workspace_turn.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/comm/plan_tools.h"
#include "kernels/comm/turn_gate.h"
#include "tests/kernels/support/simulation.h"

namespace mk::kernels::testing {
namespace {

constexpr std::uint32_t kOperators = 3;
constexpr std::uint32_t kWords = 24;  ///< of one rank's or node's part of an area
constexpr std::uint64_t kPartBytes = kWords * 4;

/// A turn does not wait for these.
enum class Fault { kNone, kNoTurn, kLocals, kRails, kEngines };

struct TurnOptions {
  std::uint32_t nodes, locals;
  std::uint64_t seed = 1;
  Fault fault = Fault::kNone;
  bool immediates = false;
  bool gate = false;  ///< as on a GPU
  /// A rank's sums are written once more, by an engine that this rank's next launch waits for: when
  /// its kernel has ended, and whether anyone still looks or not.
  bool engines = false;
  std::uint32_t turns_before = 0;
};

/// A turn's kernel with one lane.
struct GateExecutor : SimExecutor {
  using SimExecutor::SimExecutor;
  static std::uint32_t lane() { return 0; }
  static std::uint32_t lanes() { return 1; }
  static bool all(bool yes) { return yes; }
  static void waits(bool) {}
};

class TurnSimulation {
 public:
  explicit TurnSimulation(const TurnOptions& options)
      : options_(options),
        cluster_({options.nodes, options.locals, kData + 3 * area_bytes(), flag_count(), 1, 4}),
        network_(cluster_, options.seed, network_options()),
        fibers_(kOrders[options.seed % std::size(kOrders)], options.seed) {
    std::mt19937_64 random(options.seed);
    for (std::uint32_t launch = 0, last = kOperators; launch < 14; ++launch) {
      std::uint32_t op = static_cast<std::uint32_t>(random() % kOperators);
      if (op == last) op = (op + 1) % kOperators;
      order_.push_back(last = op);
    }
    fibers_.starve(static_cast<std::uint32_t>(options.seed % cluster_.size()));
    for (std::uint32_t rank = 0; rank < cluster_.size(); ++rank) {
      ranks_.push_back(std::make_unique<Rank>());
      ranks_[rank]->turn.context = cluster_.context(rank);
      for (std::uint32_t op = 0; op < kOperators; ++op)
        ranks_[rank]->turn.words_at[op] = words_at(op);
      begin_with(*ranks_[rank], options_.turns_before);
      fibers_.add(rank, [this, rank] { drive(*ranks_[rank]); });
    }
  }

  /// Empty, or what went wrong first.
  std::string run() {
    fibers_.run([this] { return network_.busy(); }, [this] { network_.step(); },
                [this] { now_ns_ += 1'000'000; });
    return wrong_.empty() ? network_.complaint() : wrong_;
  }

  /// Of turns' flags that other nodes send, at any rank.
  std::uint32_t oldest_flag() const {
    std::uint32_t oldest = ~0u;
    for (const auto& rank : ranks_) {
      const RankContext& context = rank->turn.context;
      for (std::uint32_t node = 0; node < options_.nodes; ++node) {
        for (std::uint32_t op = 0; op < kTurnFlags && node != context.world.node; ++op)
          oldest = std::min(oldest, context.arrival_flags[WorkspaceTurn::flag(node, op)]);
      }
    }
    return oldest;
  }

 private:
  static constexpr std::uint64_t kData = (1 + kOperators) * kPage;
  static_assert(WorkspaceTurn::head_bytes(3) <= kPage);

  struct Rank {
    WorkspaceTurn turn;
    LocalWords local;
    std::uint32_t epochs[kOperators] = {};
    std::uint32_t last = kOperators;  ///< who has launched last
  };

  NetworkOptions network_options() const {
    NetworkOptions network;
    network.immediates = options_.immediates;
    return network;
  }
  std::uint64_t area_bytes() const {
    return kPartBytes * std::max(options_.nodes, options_.locals);
  }
  std::uint32_t turn_flags() const {
    return static_cast<std::uint32_t>(
        round_up_to(WorkspaceTurn::flags(options_.nodes), shm::kFlagGranule));
  }
  std::uint32_t flag_count() const { return turn_flags() + kOperators * shm::kFlagGranule; }
  std::uint32_t arrival(std::uint32_t op, std::uint32_t from) const {
    return turn_flags() + op * shm::kFlagGranule + from;
  }
  static std::uint64_t words_at(std::uint32_t op) { return kPage * (1 + op); }
  /// An operator's areas are in another order than the next one's: 0 sums, 1 sent, 2 received. On
  /// one node there are only sums, in another order of ranks.
  std::uint64_t area(std::uint32_t op, std::uint32_t which, std::uint32_t part) const {
    if (options_.nodes == 1) return kData + (part + op) % options_.locals * kPartBytes;
    return kData + (op + which) % 3 * area_bytes() + part * kPartBytes;
  }
  static std::uint32_t value(std::size_t launch, std::uint32_t writer, std::uint32_t word) {
    return static_cast<std::uint32_t>(launch * 1'000'003 + writer * 1009 + word * 17 + 1);
  }

  std::uint32_t* words(const Rank& rank, std::uint32_t local, std::uint64_t offset) const {
    return reinterpret_cast<std::uint32_t*>(rank.turn.context.workspaces[local] + offset);
  }
  void fill(const Rank& rank, std::uint32_t local, std::uint64_t offset, std::size_t launch) {
    std::uint32_t* const to = words(rank, local, offset);
    for (std::uint32_t word = 0; word < kWords; ++word) {
      to[word] = value(launch, rank.turn.context.world.rank(), word);
      if (word % 4 == 0) fibers_.maybe_yield();
    }
  }
  void check(const Rank& rank, std::uint32_t local, std::uint64_t offset, std::size_t launch,
             std::uint32_t writer, const char* what) {
    const std::uint32_t* const from = words(rank, local, offset);
    for (std::uint32_t word = 0; word < kWords; ++word) {
      if (word % 4 == 0) fibers_.maybe_yield();
      if (from[word] == value(launch, writer, word) || !wrong_.empty()) continue;
      wrong_ = fmt::format("launch {} on rank {}: {} of rank {}, word {} is not its own", launch,
                           rank.turn.context.world.rank(), what, writer, word);
    }
  }
  std::uint32_t turns(const Rank& rank) const {
    TurnGate gate;
    gate.memory = rank.turn.context;
    return options_.gate ? *gate.turns() : rank.turn.number;
  }
  /// So many turns ago all was as it is.
  void begin_with(Rank& rank, std::uint32_t turns) const {
    const RankContext& context = rank.turn.context;
    TurnGate gate;
    gate.memory = context;
    *gate.turns() = rank.turn.number = turns;
    for (std::uint32_t local = 0; local < options_.locals; ++local)
      *WorkspaceTurn::left(context, context.world.local, local) = turns;
    for (std::uint32_t flag = 0; flag < WorkspaceTurn::flags(options_.nodes); ++flag)
      context.arrival_flags[flag] = turns;
  }
  void forge(Rank& rank, std::uint32_t op) {
    const WorkspaceTurn& turn = rank.turn;
    const World& world = turn.context.world;
    if (rank.last == kOperators) return;
    if (options_.fault == Fault::kLocals) {
      const std::uint32_t before = rank.last;
      for (std::uint32_t local = 0; local < world.locals; ++local) {
        *const_cast<std::uint32_t*>(turn.finished(before, local)) =
            *turn.finished(before, world.local);
        *WorkspaceTurn::left(turn.context, world.local, local) = turns(rank) + 1;
      }
    }
    if (options_.fault == Fault::kRails) {
      for (std::uint32_t node = 0; node < world.nodes; ++node)
        turn.context.arrival_flags[WorkspaceTurn::flag(node, op)] = turns(rank) + 1;
    }
  }

  void drive(Rank& rank) {
    for (std::size_t number = 0; number < order_.size(); ++number) {
      if (!launch(rank, number, order_[number]) || !wrong_.empty()) break;
    }
    if (rank.local.stop != 0 && wrong_.empty())
      wrong_ = fmt::format("rank {} waited for ever", rank.turn.context.world.rank());
    fibers_.changed();
  }

  bool take_its_turn(Rank& rank, const Launch& launch, SimParts& parts, WaitTotals& totals) {
    GateExecutor executor(fibers_, now_ns_, parts);
    if (!options_.gate) return take_turn(executor, launch, rank.turn, totals);
    TurnGate gate;
    gate.memory = rank.turn.context;
    gate.sharer = launch.context.shared->sharer;
    gate.words_at = words_at(gate.sharer);
    gate.control = launch.control;
    gate.outlasts = options_.engines && options_.fault != Fault::kEngines;
    return take_turn(executor, gate, totals);
  }

  bool launch(Rank& rank, std::size_t number, std::uint32_t op) {
    const World world = rank.turn.context.world;
    const std::uint32_t epoch = ++rank.epochs[op];
    const WorkspaceHead head{world.locals};
    Launch launch;
    launch.context = rank.turn.context;
    for (std::byte*& workspace : launch.context.workspaces) {
      if (workspace != nullptr) workspace += words_at(op);
    }
    const WorkspaceShare shared{&rank.turn, op, 0};
    launch.context.shared = &shared;
    launch.local = &rank.local;
    launch.control.stop = &rank.local.stop;
    launch.control.record = &rank.local.failure;
    launch.control.timeout_ns = 1000;
    launch.epoch = epoch;
    SimParts parts;
    SimExecutor executor(fibers_, now_ns_, parts);
    WaitTotals totals;
    if (rank.last != op) forge(rank, op);
    rank.last = op;
    if (options_.fault != Fault::kNoTurn && !take_its_turn(rank, launch, parts, totals))
      return false;
    fibers_.changed();
    announce_launch(launch);

    // Word lines behind the head: sums of a local rank are here; what it received is there.
    const auto line = [&](std::uint32_t kind, std::uint32_t by) {
      return words_at(op) + head.bytes() + WorkspaceHead::kLine * (kind * world.locals + by);
    };
    const auto publish = [&](std::uint32_t kind) {
      for (std::uint32_t local = 0; local < world.locals; ++local)
        shm::store_release(words(rank, local, line(kind, world.local)), epoch);
      fibers_.changed();
    };
    const auto await = [&](const std::uint32_t* word) {
      return wait_flag(executor, launch.control, WaitSite{}, totals, word, epoch);
    };
    for (std::uint32_t local = 0; local < world.locals; ++local)
      fill(rank, local, area(op, 0, world.local), number);
    publish(0);
    if (world.nodes > 1) {
      fill(rank, world.local, area(op, 1, 0), number);
      // As of the whole memory.
      ChunkSender<SimExecutor> sender(executor, launch.control, rank.turn.context, 0, totals);
      for (std::uint32_t node = 0; node < world.nodes; ++node) {
        if (node != world.node && !sender.add_chunk(node, area(op, 1, 0), area(op, 2, world.node),
                                                    kPartBytes, arrival(op, world.node), epoch))
          return false;
      }
      sender.commit();
      fibers_.changed();
    }
    for (std::uint32_t local = 0; local < world.locals; ++local) {
      if (!await(words(rank, world.local, line(0, local)))) return false;
      check(rank, world.local, area(op, 0, local), number, world.node * world.locals + local,
            "the sum");
    }
    for (std::uint32_t node = 0; node < world.nodes; ++node) {
      if (node != world.node && !await(rank.turn.context.arrival_flags + arrival(op, node)))
        return false;
    }
    if (world.nodes > 1) publish(1);
    for (std::uint32_t local = 0; world.nodes > 1 && local < world.locals; ++local) {
      if (!await(words(rank, world.local, line(1, local)))) return false;
      for (std::uint32_t node = 0; node < world.nodes; ++node) {
        if (node != world.node)
          check(rank, local, area(op, 2, node), number, node * world.locals + local, "the rows");
      }
    }
    announce_end(launch);
    fibers_.changed();
    for (std::uint32_t local = 0; options_.engines && local < world.locals; ++local)
      fill(rank, local, area(op, 0, world.local), number);
    return true;
  }

  const TurnOptions options_;
  Cluster cluster_;
  Network network_;
  Fibers fibers_;
  std::vector<std::uint32_t> order_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::uint64_t now_ns_ = 0;
  std::string wrong_;
};

constexpr std::uint64_t kSeeds = 300;

std::vector<TurnOptions> worlds() {
  std::vector<TurnOptions> all = {{1, 2}, {1, 3}, {2, 1}, {2, 2}, {3, 1}, {3, 2}};
  for (const auto& [nodes, locals] :
       {std::pair{1u, 2u}, {1u, 3u}, {1u, 4u}, {2u, 1u}, {2u, 2u}, {3u, 1u}, {3u, 2u}})
    all.push_back({.nodes = nodes, .locals = locals, .gate = true});
  return all;
}

TEST(WorkspaceTurn, OperatorsNeverMeetInWhatTheyShare) {
  for (TurnOptions options : worlds()) {
    for (options.seed = 1; options.seed <= kSeeds; ++options.seed) {
      options.immediates = options.seed % 2 == 0;
      TurnSimulation simulation(options);
      ASSERT_EQ("", simulation.run())
          << options.nodes << " x " << options.locals << ", seed " << options.seed;
    }
  }
}

int seeds_wrong(TurnOptions options) {
  int wrong = 0;
  for (options.seed = 1; options.seed <= kSeeds; ++options.seed)
    wrong += !TurnSimulation(options).run().empty();
  return wrong;
}

std::vector<TurnOptions> worlds_with_engines() {
  std::vector<TurnOptions> all = worlds();
  std::erase_if(all, [](const TurnOptions& one) { return !one.gate || one.locals == 1; });
  for (TurnOptions& one : all) one.engines = true;
  return all;
}
TEST(WorkspaceTurn, NorDoEnginesThatOutlastTheirLaunches) {
  for (TurnOptions options : worlds_with_engines()) {
    for (options.seed = 1; options.seed <= kSeeds; ++options.seed) {
      TurnSimulation simulation(options);
      ASSERT_EQ("", simulation.run())
          << options.nodes << " x " << options.locals << ", seed " << options.seed;
    }
  }
}

// A flag that nobody has sent for half of all epochs would count as reached.
TEST(WorkspaceTurn, FlagsOfTurnsAreSentAnewBeforeTheyAreTooOld) {
  for (TurnOptions options : worlds()) {
    if (options.nodes == 1) continue;
    options.turns_before = kTurnFlagsAnew - 5;
    for (options.seed = 1; options.seed <= 20; ++options.seed) {
      TurnSimulation simulation(options);
      ASSERT_EQ("", simulation.run());
      EXPECT_GE(simulation.oldest_flag(), kTurnFlagsAnew)
          << options.nodes << " x " << options.locals << ", seed " << options.seed;
    }
  }
}

TEST(WorkspaceTurn, WithoutTurnsTheyDo) {
  for (TurnOptions options : worlds()) {
    options.fault = Fault::kNoTurn;
    EXPECT_GT(seeds_wrong(options), 0) << options.nodes << " x " << options.locals;
  }
}
TEST(WorkspaceTurn, ATurnThatDoesNotAwaitTheNodeIsSeen) {
  for (TurnOptions options : worlds()) {
    if (options.locals == 1) continue;
    options.fault = Fault::kLocals;
    EXPECT_GT(seeds_wrong(options), 0) << options.nodes << " x " << options.locals;
  }
}
TEST(WorkspaceTurn, ATurnThatDoesNotAwaitTheOtherNodesIsSeen) {
  for (TurnOptions options : worlds()) {
    if (options.nodes == 1) continue;
    options.fault = Fault::kRails;
    EXPECT_GT(seeds_wrong(options), 0) << options.nodes << " x " << options.locals;
  }
}

TEST(WorkspaceTurn, ATurnThatDoesNotAwaitEnginesIsSeen) {
  for (TurnOptions options : worlds_with_engines()) {
    if (options.nodes > 1) continue;  // over nodes ranks tell each other anyway
    options.fault = Fault::kEngines;
    EXPECT_GT(seeds_wrong(options), 0) << options.nodes << " x " << options.locals;
  }
}

}  // namespace
}  // namespace mk::kernels::testing
