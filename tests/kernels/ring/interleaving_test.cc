// Ring Attention's launches in adversarial orders (ring_simulation.h): each ends, and every query
// sees its keys once. Faults that are put in are seen.
#include "tests/kernels/ring/ring_simulation.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <random>
#include <tuple>
#include <utility>
#include <vector>

namespace mk::kernels::testing {
namespace {

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
      options.turn_chunks = static_cast<std::uint32_t>(random() % 2);
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
    options.turn_chunks = seed % 7 < 4 ? 1 : 0;
    ASSERT_EQ(RingSimulation(options).run(), "") << "seed " << seed;
  }
}

/// On one node, with copy engines.
RingOptions with_engines(std::uint64_t seed) {
  RingOptions options = small(1, static_cast<std::uint32_t>(2 + seed % 4), seed);
  options.shape.query_heads = options.shape.key_heads = 4;
  options.shape.batch = 1 + seed / 4 % 2;
  options.tiling.packing = KeyPacking::kHeads;
  options.tiling.engines = true;
  options.tiling.heads_together = 1u << seed / 2 % 3;
  options.tiling.chunk_bytes = 100 + static_cast<std::uint32_t>(seed * 7919 % 4000);
  return options;
}

// Some of the ranks' engines in each launch, with all numbers of heads together.
TEST(RingAttentionInterleaving, EnginesBringKeysWithinTheNode) {
  for (std::uint64_t seed = 1; seed <= 80; ++seed)
    ASSERT_EQ(RingSimulation(with_engines(seed)).run(), "") << "seed " << seed;
  for (const Order order : kOrders) {
    for (std::uint32_t locals = 2; locals <= 8; ++locals) {
      RingOptions options = with_engines(locals);
      options.locals = locals;
      options.order = order;
      options.shape.seq_max = locals * 2 + 9;
      options.launches = launches_from(locals * 2, locals * 2 + 9, 6, locals);
      ASSERT_EQ(RingSimulation(options).run(), "") << locals << " ranks";
    }
  }
}

int wrong_engines_of_60(EngineFault fault) {
  return seeds_seen_wrong<RingSimulation>(60, [&](std::uint64_t seed) {
    RingOptions options = with_engines(seed);
    // The same m, or a rank that is behind would be found out by its header.
    options.launches.assign(8, {static_cast<std::uint32_t>(options.shape.seq_max), Mode::kFused});
    options.engine_fault = fault;
    return options;
  });
}

// If engines that do not wait, or show what is not there, went unnoticed, the test above would
// prove nothing.
TEST(RingAttentionInterleaving, EnginesThatDoNotWaitAreSeen) {
  EXPECT_EQ(wrong_engines_of_60(EngineFault::kNone), 0);
  EXPECT_GT(wrong_engines_of_60(EngineFault::kBeginAtOnce), 20);
  EXPECT_GT(wrong_engines_of_60(EngineFault::kShowFirst), 20);
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
