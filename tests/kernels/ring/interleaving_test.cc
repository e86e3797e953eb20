// The roles of Ring Attention as a discrete-event simulation (support/simulation.h). Instead of
// attention, each query adds up a number for each key that it is given, read from the key's and the
// value's bytes: the sums are right only if every key that the mask admits came exactly once, from
// this launch, whole.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/ops/ring/roles.h"
#include "kernels/ops/ring/spec.h"
#include "tests/kernels/support/simulation.h"

namespace mk::kernels::testing {
namespace {

struct RingOptions : SimOptions {
  RingAttentionShape shape;
  RingAttentionTiling tiling;
  bool forge_releases = false;  ///< the one bank looks released for ever
};

std::uint32_t mixed(std::uint32_t hash) {
  hash ^= hash >> 15;
  hash *= 0x2c1b3c6du;
  return hash ^ hash >> 12;
}

/// What the elements of a key head's key (or value) are in a launch, all of a row the same.
/// `head`: of the heads of all batches.
std::uint16_t content(std::uint32_t epoch, std::uint32_t position, std::uint32_t head, bool value) {
  return static_cast<std::uint16_t>(mixed(epoch * 0x85ebca6bu ^ position * 0x9e3779b1u ^
                                          (head * 2 + (value ? 1u : 0u)) * 0xc2b2ae35u));
}
std::uint64_t number_of(std::uint16_t key, std::uint16_t value) {
  return mixed(std::uint32_t{key} << 16 | value);
}

struct RingRank {
  RingAttentionLaunch launch;
  std::vector<std::uint16_t> keys;
  std::vector<std::uint16_t> values;
  std::map<std::uint32_t, std::vector<std::uint64_t>> aside;  ///< by item: its sums
  std::vector<std::uint64_t> out;                             ///< [row][pair]
  bool attended = false;
  bool attended_early = false;  ///< before everything had arrived
  std::uint32_t resumed_most = 0;
  std::map<std::uint32_t, std::uint32_t> resumed;  ///< by item: how often
  std::map<std::uint32_t, std::uint64_t> shown;    ///< by origin: rows, to compute blocks
};

/// The executor of kernels/ops/ring/roles.h; yields between rows.
class Executor : public SimExecutor {
 public:
  Executor(const SimExecutor& frame, RingRank& rank) : SimExecutor(frame), rank_(rank) {}

  void begin(const AttentionItem& item) { sums_.assign(item.query.rows, 0); }
  void resume(const AttentionItem& item) {
    sums_ = rank_.aside.at(item.number);
    rank_.aside.erase(item.number);
    rank_.resumed_most = std::max(rank_.resumed_most, ++rank_.resumed[item.number]);
  }
  void attend(const AttentionItem& item, const AttentionKeys& keys, bool all,
              std::int64_t diagonal) {
    const RingAttentionGeometry& plan = rank_.launch.plan;
    rank_.attended = true;
    for (std::uint32_t j = 0; j < keys.rows; ++j) {
      // The first element of the key and the last of the value.
      std::uint16_t key = 0;
      std::uint16_t value = 0;
      std::copy_n(keys.keys + j * keys.key_stride, 2, reinterpret_cast<std::byte*>(&key));
      maybe_yield();
      std::copy_n(keys.values + j * keys.value_stride + (plan.head_dim - 1) * kElementBytes, 2,
                  reinterpret_cast<std::byte*>(&value));
      for (std::uint32_t i = 0; i < item.query.rows; ++i) {
        if (all || std::int64_t{j} <= std::int64_t{i} + diagonal) sums_[i] += number_of(key, value);
      }
    }
  }
  void put_aside(const AttentionItem& item) { rank_.aside[item.number] = sums_; }
  void finish(const AttentionItem& item) {
    for (std::uint32_t i = 0; i < item.query.rows; ++i) {
      rank_.out[std::size_t{item.query.row + i} * rank_.launch.plan.head_pairs() + item.pair] =
          sums_[i];
    }
  }
  void copy(const CopyJob& job) { copy_in_pieces(job, 200); }

 protected:
  RingRank& rank_;

 private:
  std::vector<std::uint64_t> sums_;
};

/// One whose compute blocks hear from others what has arrived, as on a GPU.
class WatchingExecutor : public Executor {
 public:
  using Executor::Executor;
  void show_rows(std::uint32_t origin, std::uint64_t rows) {
    maybe_yield();
    rank_.shown[origin] = rows;
  }
  std::uint64_t rows_shown(std::uint32_t origin) {
    const auto found = rank_.shown.find(origin);
    return found == rank_.shown.end() ? 0 : found->second;
  }
};

class RingSimulation : private SimOperator {
 public:
  explicit RingSimulation(const RingOptions& options)
      : options_(options),
        plan_(make_plan(options)),
        ranks_(make_ranks(options, plan_)),
        network_bytes_(ranks_.size()),
        simulation_(*this, options, plan_.workspace_bytes, plan_.flag_count()) {
    if (options.forge_releases) forge_releases();
  }

  std::string run() {
    const std::string wrong = simulation_.run();
    if (!wrong.empty()) return wrong;
    for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) {
      if (simulation_.network().bytes_of(rank) != network_bytes_[rank]) {
        return fmt::format("rank {} sent {} bytes, not {}", rank,
                           simulation_.network().bytes_of(rank), network_bytes_[rank]);
      }
    }
    return {};
  }
  bool saw_wrong_element() const { return simulation_.saw_wrong_element(); }
  /// How often any item was taken up again in a launch, at most.
  std::uint32_t resumed_most() const {
    std::uint32_t most = 0;
    for (const RingRank& rank : ranks_) most = std::max(most, rank.resumed_most);
    return most;
  }
  /// Launches in which a rank had attended keys before everything had arrived, and all launches.
  std::pair<int, int> overlapped(Mode mode) const { return overlapped_[static_cast<int>(mode)]; }

 private:
  static RingAttentionPlan make_plan(const RingOptions& options) {
    return plan_or_throw(
        RingAttentionPlan::make(options.nodes, options.locals, options.shape, options.tiling));
  }
  static std::vector<RingRank> make_ranks(const RingOptions& options,
                                          const RingAttentionPlan& plan) {
    std::vector<RingRank> ranks(options.nodes * options.locals);
    for (RingRank& rank : ranks) {
      rank.launch.plan = plan;
      rank.launch.banks = plan.banks;
      rank.launch.blocks = options.blocks;
    }
    return ranks;
  }

  const char* name() const override { return "ring_attention"; }
  Launch& launch(std::uint32_t rank) override { return ranks_[rank].launch; }
  std::vector<RoleThread> threads(const World& world) const override {
    const RoleBlocks& blocks = options_.blocks;
    std::vector<RoleThread> threads;
    add_role(threads, Role::kCompute, blocks.compute);
    add_gather_roles(threads, world, blocks);
    if (plan_.packing == KeyPacking::kHeads) add_role(threads, Role::kCollect, world.nodes);
    return threads;
  }

  /// The rank's rows as positions in the sequence, by the definition of the parts.
  std::vector<std::uint32_t> positions(std::uint32_t rank, std::uint32_t seq) const {
    std::vector<std::uint32_t> all;
    for (std::uint32_t part : {rank, plan_.parts() - 1 - rank}) {
      const ShardRange range = shard_of(seq, plan_.parts(), part);
      for (std::uint32_t i = 0; i < range.count; ++i) all.push_back(range.first + i);
      if (!plan_.causal) break;
    }
    return all;
  }

  void begin(std::uint32_t index) override {
    RingRank& rank = ranks_[index];
    const std::uint32_t epoch = rank.launch.epoch;
    const std::uint32_t pairs = plan_.head_pairs();
    const auto own = positions(index, rank.launch.m);
    const auto rows = static_cast<std::uint32_t>(own.size());
    // Keys as [row][batch][head], values the same or, by heads, as [batch][head][row].
    const bool by_heads = plan_.packing == KeyPacking::kHeads;
    rank.keys.resize(std::size_t{rows} * pairs * plan_.head_dim);
    rank.values.resize(rank.keys.size());
    for (std::size_t i = 0; i < rank.keys.size(); ++i) {
      const std::size_t line = i / plan_.head_dim;
      rank.keys[i] =
          content(epoch, own[line / pairs], static_cast<std::uint32_t>(line % pairs), false);
      rank.values[i] =
          by_heads
              ? content(epoch, own[line % rows], static_cast<std::uint32_t>(line / rows), true)
              : content(epoch, own[line / pairs], static_cast<std::uint32_t>(line % pairs), true);
    }
    const std::uint64_t line = plan_.head_bytes();
    const HeadTensor keys{reinterpret_cast<const std::byte*>(rank.keys.data()),
                          plan_.key_heads * line, pairs * line, line};
    HeadTensor values = keys;
    if (by_heads) values = {nullptr, plan_.key_heads * rows * line, line, rows * line};
    values.base = reinterpret_cast<const std::byte*>(rank.values.data());
    rank.launch.keys_values = KeySource::of(plan_, keys, values, rows);
    rank.attended = rank.attended_early = false;
    rank.aside.clear();
    rank.resumed.clear();
    rank.shown.clear();
    rank.out.assign(own.size() * pairs, 0xdddddddddddddddd);
    const RingAttentionSchedule schedule(plan_, rank.launch.context.world, rank.launch.m,
                                         rank.launch.mode);
    network_bytes_[index] += schedule.network_bytes();
  }

  bool run_role(std::uint32_t index, Role role, std::uint32_t block_index, BlockTotals& totals,
                const SimExecutor& frame) override {
    if (plan_.packing == KeyPacking::kHeads)
      return run_role_with<WatchingExecutor>(index, role, block_index, totals, frame);
    return run_role_with<Executor>(index, role, block_index, totals, frame);
  }
  template <class RoleExecutor>
  bool run_role_with(std::uint32_t index, Role role, std::uint32_t block_index, BlockTotals& totals,
                     const SimExecutor& frame) {
    RoleExecutor executor(frame, ranks_[index]);
    RingAttentionBlock<RoleExecutor> block(executor, ranks_[index].launch, role, block_index,
                                           totals);
    switch (role) {
      case Role::kCompute:
        return ring_attention::compute(block);
      case Role::kCollect:
        if constexpr (requires { executor.show_rows(0u, 0u); }) return ring_attention::watch(block);
        return false;
      case Role::kShare:
        return ring_attention::share(block);
      case Role::kSend:
        return ring_attention::send(block);
      default:
        return ring_attention::receive(block);
    }
  }

  void watch(std::uint32_t index) override {
    RingRank& rank = ranks_[index];
    const World& world = rank.launch.context.world;
    const GatherSchedule schedule(plan_.gather, world);
    if (!rank.attended || rank.attended_early) return;
    for (std::uint32_t node = 0; node < world.nodes; ++node) {
      if (node == world.node) continue;
      const auto rows =
          static_cast<std::uint32_t>(positions(world.rail_peer(node), rank.launch.m).size());
      const std::uint32_t flag =
          schedule.arrival(bank_of(rank.launch.epoch, plan_.banks), world.node, node,
                           schedule.chunks(plan_.gathered_rows(rows)) - 1);
      rank.attended_early |=
          !shm::flag_reached(rank.launch.context.arrival_flags + flag, rank.launch.epoch);
    }
  }

  std::string check(std::uint32_t index) override {
    const RingRank& rank = ranks_[index];
    auto& [early, all] = overlapped_[static_cast<int>(rank.launch.mode)];
    early += rank.attended_early;
    ++all;
    const std::uint32_t seq = rank.launch.m;
    const auto own = positions(index, seq);
    for (std::uint32_t head = 0; head < plan_.head_pairs(); ++head) {
      std::vector<std::uint64_t> sums(seq + 1);  // of the first keys
      for (std::uint32_t j = 0; j < seq; ++j) {
        sums[j + 1] = sums[j] + number_of(content(rank.launch.epoch, j, head, false),
                                          content(rank.launch.epoch, j, head, true));
      }
      for (std::size_t row = 0; row < own.size(); ++row) {
        const std::uint64_t expected = sums[plan_.causal ? own[row] + 1 : seq];
        if (rank.out[row * plan_.head_pairs() + head] != expected)
          return fmt::format("row {} of the sequence, head {} is wrong", own[row], head);
      }
    }
    return {};
  }

  void forge_releases() {
    for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) {
      const World world{options_.nodes, options_.locals, rank / options_.locals,
                        rank % options_.locals};
      const GatherSchedule schedule(plan_.gather, world);
      simulation_.forge_flag(rank, schedule.release(world.node));
    }
  }

  RingOptions options_;
  RingAttentionPlan plan_;
  std::vector<RingRank> ranks_;
  std::vector<std::uint64_t> network_bytes_;  ///< by rank, of all launches so far
  std::pair<int, int> overlapped_[2] = {};
  Simulation simulation_;
};

std::vector<SimLaunch> launches_from(std::uint32_t least, std::uint32_t most, std::uint32_t count,
                                     std::uint64_t seed) {
  std::vector<SimLaunch> launches = random_sim_launches(count, most - least + 1, seed);
  for (SimLaunch& launch : launches) launch.m += least - 1;
  return launches;
}

class EveryWorldAndOrder : public ::testing::TestWithParam<std::tuple<std::uint32_t, bool>> {};

TEST_P(EveryWorldAndOrder, EndsAndEveryQuerySeesItsKeysOnce) {
  const auto [nodes, causal] = GetParam();
  for (std::uint32_t locals = 1; locals <= 8; ++locals) {
    for (Order order : kOrders) {
      RingOptions options;
      options.nodes = nodes;
      options.locals = locals;
      options.order = order;
      options.seed = nodes * 1000 + locals * 100 + static_cast<std::uint64_t>(order) * 10 + causal;
      std::mt19937_64 random(options.seed);
      const auto pick = [&](std::uint32_t most) {
        return static_cast<std::uint32_t>(1 + random() % most);
      };
      const std::uint32_t parts = nodes * locals * (causal ? 2 : 1);
      options.shape = {parts + 8 + pick(8), 2, pick(2), 64, causal};
      options.shape.batch = pick(2);
      options.tiling = {pick(3), pick(3), 100 + pick(900), pick(4), pick(2)};
      options.tiling.packing = random() % 2 == 0 ? KeyPacking::kHeads : KeyPacking::kRows;
      options.blocks = {pick(2), 1, pick(2), pick(2), pick(2), 1, 1};
      options.launches = launches_from(parts, static_cast<std::uint32_t>(options.shape.seq_max),
                                       nodes > 2 ? 2 : 3, options.seed);
      RingSimulation simulation(options);
      ASSERT_EQ(simulation.run(), "") << fmt::format("{} x {}, order {}, seed {}", nodes, locals,
                                                     static_cast<int>(order), options.seed);
      ASSERT_LE(simulation.resumed_most(), options.tiling.remote_passes);
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Worlds, EveryWorldAndOrder,
                         ::testing::Combine(::testing::Values(1u, 2u, 3u, 4u), ::testing::Bool()));

RingOptions small(std::uint32_t nodes, std::uint32_t locals, std::uint64_t seed) {
  RingOptions options;
  options.nodes = nodes;
  options.locals = locals;
  options.shape = {nodes * locals * 2 + 9, 1, 1, 64, seed % 2 == 0};
  options.tiling = {2, 2, 300, static_cast<std::uint32_t>(1 + seed % 3), 2};
  options.launches = launches_from(nodes * locals * 2, nodes * locals * 2 + 9, 8, seed);
  options.set_seed(seed);
  return options;
}

TEST(RingAttentionInterleaving, ManySeeds) {
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    RingOptions options = small(static_cast<std::uint32_t>(2 + seed % 3),
                                static_cast<std::uint32_t>(1 + seed % 3), seed);
    options.tiling.banks = static_cast<std::uint32_t>(1 + seed / 2 % 2);
    options.tiling.packing = seed % 5 < 3 ? KeyPacking::kHeads : KeyPacking::kRows;
    ASSERT_EQ(RingSimulation(options).run(), "") << "seed " << seed;
  }
}

TEST(RingAttentionInterleaving, FusedLaunchesOverlapAndUnfusedOnesDoNot) {
  std::pair<int, int> fused;
  std::pair<int, int> unfused;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    RingOptions options = small(2, 2, seed);
    options.tiling.packing = seed % 4 < 2 ? KeyPacking::kHeads : KeyPacking::kRows;
    options.launches = {{17, Mode::kFused}, {17, Mode::kUnfused}, {12, Mode::kUnfused}};
    RingSimulation simulation(options);
    ASSERT_EQ(simulation.run(), "");
    fused.first += simulation.overlapped(Mode::kFused).first;
    unfused.first += simulation.overlapped(Mode::kUnfused).first;
    unfused.second += simulation.overlapped(Mode::kUnfused).second;
  }
  EXPECT_GT(fused.first, 0);
  EXPECT_EQ(unfused.first, 0);
  EXPECT_EQ(unfused.second, 20 * 2 * 4);
}

/// In how many of 60 runs something wrong was attended.
int wrong_of_60(bool forge_releases, const NetworkOptions& network, KeyPacking packing) {
  return seeds_seen_wrong<RingSimulation>(60, [&](std::uint64_t seed) {
    RingOptions options = small(2, 1, seed);
    options.tiling.banks = 1;
    options.tiling.packing = packing;
    // The same m, or a header that came too early would be taken for another m.
    options.launches.assign(8, {13, Mode::kFused});
    options.forge_releases = forge_releases;
    options.network = network;
    return options;
  });
}

// With one bank, the release is all that keeps a rank from overwriting what its successor still
// attends. If a network that shows releases which nobody sent went unnoticed, the tests above would
// prove nothing.
TEST(RingAttentionInterleaving, ABankReusedTooEarlyIsSeen) {
  NetworkOptions network;
  network.keep_forged_flags = true;
  EXPECT_GT(wrong_of_60(true, network, KeyPacking::kRows), 5);
  EXPECT_GT(wrong_of_60(true, network, KeyPacking::kHeads), 5);
}

TEST(RingAttentionInterleaving, AFlagBeforeItsDataIsSeen) {
  NetworkOptions network;
  network.flags_first = true;
  EXPECT_GT(wrong_of_60(false, network, KeyPacking::kRows), 5);
  EXPECT_GT(wrong_of_60(false, network, KeyPacking::kHeads), 5);
}

}  // namespace
}  // namespace mk::kernels::testing
