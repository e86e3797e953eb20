// MoE Dispatch+GEMM on the CPU executor, ranks as threads of one process. Every row is where the
// definition puts it and every element within its bound, for every world, any skew of routing and
// of ranks.
#include "kernels/ops/moe/cpu.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <initializer_list>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/ops/moe/schedule.h"
#include "tests/kernels/moe/job.h"
#include "tests/kernels/support/every_world.h"
#include "tests/kernels/support/network.h"
#include "tests/kernels/support/routed_tests.h"
#include "tests/kernels/support/same_bits.h"

namespace mk::kernels::testing {
namespace {

std::vector<MoeLaunch> random_launches(std::uint32_t count, std::uint64_t seed) {
  return random_routed_launches<MoeLaunch>(count, seed, [](MoeLaunch&, std::mt19937_64&) {});
}

TEST_P(EveryWorld, GivesEveryRankItsExpertsRows) {
  std::mt19937_64 random(seed());
  MoeJobOptions options;
  options.nodes = nodes();
  options.locals = locals();
  options.shape.tokens_max = 40;
  options.shape.hidden = 40;
  options.shape.features = 48;
  options.shape.experts = static_cast<std::uint32_t>(3 + random() % 20);
  options.shape.top_k = static_cast<std::uint32_t>(1 + random() % 3);
  // Enough for kRepeated too.
  options.shape.rows_max = nodes() * locals() * 40 * options.shape.top_k;
  options.dtype = (nodes() + locals()) % 2 == 0 ? DType::kBf16 : DType::kF16;
  // Tokens of 80 bytes straddle chunks of 256.
  options.tiling = {8, 16, 256, nodes() == 3 ? 1u : 0u};
  const auto blocks = [&] { return static_cast<std::uint32_t>(1 + random() % 2); };
  options.cpu.blocks.compute = blocks();
  options.cpu.blocks.plan = blocks();
  options.cpu.blocks.pull = blocks();
  options.cpu.blocks.share = blocks();
  options.cpu.blocks.send = blocks();
  options.cpu.blocks.receive = blocks();
  options.cpu.wait_timeout = std::chrono::seconds(120);
  options.cpu.b_layout = random() % 2 == 0 ? BLayout::kKN : BLayout::kNK;
  options.seed = seed();
  options.slot_count_log2 = 4;  // the smallest ring: credits run out
  MoeJob job(options);
  NetworkThread network(job.cluster(), seed());

  const auto launches = random_launches(8, seed());
  const auto results = job.run(launches, std::chrono::microseconds(3000));
  std::vector<std::vector<tools::MoeSource>> sources;
  for (const MoeLaunch& launch : launches) sources.push_back(job.sources(launch));
  expect_right_launches(
      job, network, launches, results,
      [&](std::size_t i, std::uint32_t rank, const LaunchStats& stats) {
        EXPECT_EQ(stats.m, sources[i][rank].tokens);
        // Each shard crosses to each node once: this rank sends those of its rail that are not the
        // next node's own.
        std::uint64_t expected = 0;
        for (std::uint32_t node = 0; node < nodes(); ++node) {
          const std::uint32_t here = rank / locals();
          if (nodes() == 1 || node == (here + 1) % nodes()) continue;
          const std::uint64_t tokens = sources[i][node * locals() + rank % locals()].tokens;
          expected += 128 + tokens * (8 * options.shape.top_k + 2 * options.shape.hidden);
        }
        EXPECT_EQ(stats.network_bytes, expected);
      });
  // A bound far above what is seen would prove little.
  EXPECT_GT(job.worst(), 0.01);
}

INSTANTIATE_TEST_SUITE_P(Worlds, EveryWorld,
                         ::testing::Combine(::testing::Values(1u, 2u, 3u, 4u),
                                            ::testing::Values(1u, 2u, 3u, 4u, 8u)),
                         name_of_world);

MoeJobOptions two_by_two() {
  MoeJobOptions options;
  options.nodes = 2;
  options.locals = 2;
  options.shape = {30, 24, 40, 6, 2, 240};
  options.tiling = {8, 16, 128, 0};
  options.cpu.wait_timeout = std::chrono::seconds(120);
  return options;
}

TEST(MoeDispatchCpu, RepeatedRunsGiveTheSameBits) {
  MoeJobOptions options = two_by_two();
  options.shape.hidden = 700 * 8;
  options.shape.tokens_max = 12;
  options.shape.rows_max = 0;
  options.tiling.chunk_bytes = 8192;
  options.cpu.blocks.compute = 2;
  MoeJob job(options);
  expect_same_bits_each_time(job, MoeLaunch{}, 6, &MoeRankResult::y);
}

// Tokens that go nowhere, the weights of their slots, and what an earlier launch left in the rows
// of padding: NaN and infinities there change no bit, and are refused nowhere.
TEST(MoeDispatchCpu, WhatGoesNowhereAndPaddingChangeNoBit) {
  for (const DType dtype : {DType::kBf16, DType::kF16}) {
    for (const std::uint32_t nodes : {1u, 2u}) {
      MoeJobOptions options = two_by_two();
      options.dtype = dtype;
      options.nodes = nodes;
      options.shape.rows_max = 0;
      MoeLaunch numbers;
      numbers.unused = MoeLaunch::Unused::kNumbers;
      MoeLaunch special = numbers;
      special.unused = MoeLaunch::Unused::kSpecial;
      MoeLaunch
          leaves_specials;  // many rows, so that packed rows of all tiles hold them afterwards
      leaves_specials.all_special = true;
      leaves_specials.inputs = 1;
      MoeJob job(options);
      NetworkThread network(job.cluster(), nodes);
      const auto results = job.run({numbers, leaves_specials, special, special});
      ASSERT_EQ(job.check(numbers, results[0]), "");
      ASSERT_EQ(job.check(leaves_specials, results[1]), "");
      for (const std::size_t launch : {2u, 3u}) {
        for (std::uint32_t rank = 0; rank < job.size(); ++rank) {
          ASSERT_TRUE(results[launch][rank].stats) << results[launch][rank].stats.error().message;
          EXPECT_EQ(results[launch][rank].rows, results[0][rank].rows);
          EXPECT_EQ(results[launch][rank].y, results[0][rank].y) << "rank " << rank;
        }
      }
    }
  }
}

// A rank with one expert may get every slot of every token.
TEST(MoeDispatchCpu, TheDefaultRoomHoldsTokensThatNameOneExpertInAllSlots) {
  MoeJobOptions options = two_by_two();
  options.shape = {10, 24, 40, 4, 3, 0};
  MoeJob job(options);
  NetworkThread network(job.cluster(), 8);
  EXPECT_EQ(job.plan().shape.rows_max, 4u * 10 * 3);
  const std::vector<MoeLaunch> launches = {{Skew::kOneRank, false, Mode::kFused, 0}};
  const auto results = job.run(launches);
  ASSERT_EQ(job.check(launches[0], results[0]), "");
  std::size_t most = 0;
  for (const MoeRankResult& result : results[0]) most = std::max(most, result.rows.size());
  EXPECT_EQ(most, 4u * 10 * 3);
}

/// In both layouts and types; a column tile that is narrower than the others, and one alone.
void expect_right_with(std::initializer_list<MoeEpilogue> epilogues, bool bias) {
  std::uint32_t turn = 0;
  for (const MoeEpilogue epilogue : epilogues) {
    for (const BLayout layout : {BLayout::kKN, BLayout::kNK}) {
      for (const std::uint32_t tile_n : {16u, 0u}) {
        MoeJobOptions options = two_by_two();
        options.dtype = turn++ % 2 == 0 ? DType::kBf16 : DType::kF16;
        options.shape.epilogue = epilogue;
        options.shape.bias = bias;
        options.tiling.tile_n = tile_n;
        options.cpu.b_layout = layout;
        options.cpu.blocks.compute = 2;
        MoeJob job(options);
        NetworkThread network(job.cluster(), turn);
        const auto launches = random_launches(3, turn);
        const auto results = job.run(launches);
        for (std::size_t i = 0; i < launches.size(); ++i)
          ASSERT_EQ(job.check(launches[i], results[i]), "") << name_of(epilogue) << " " << i;
        // A bound far above what is seen would prove little.
        EXPECT_GT(job.worst(), 0.01);
      }
    }
  }
}

// Gates and up projections in two halves or alternating.
TEST(MoeDispatchCpu, GatedSiluGivesTheProductOfBothHalves) {
  expect_right_with({MoeEpilogue::kGatedSilu, MoeEpilogue::kGatedSiluInterleaved}, false);
}

TEST(MoeDispatchCpu, EveryEpilogueAddsTheExpertsBias) {
  expect_right_with(
      {MoeEpilogue::kNone, MoeEpilogue::kGatedSilu, MoeEpilogue::kGatedSiluInterleaved}, true);
}

TEST(MoeDispatchCpu, ALaunchBringsABiasIfTheShapeHasOneAndOnlyThen) {
  for (const bool bias : {false, true}) {
    MoeJobOptions options;
    options.shape = {10, 24, 40, 4, 3, 0};
    options.shape.bias = bias;
    MoeJob job(options);
    const std::vector<std::uint16_t> any(std::size_t{24} * 40 * 4);
    std::vector<std::uint16_t> y(std::size_t{30} * 40);
    MoeDispatchInput input;
    input.expert_weights = any.data();
    input.bias = bias ? nullptr : any.data();
    const auto launched = job.op(0).launch(input, y.data(), 30);
    ASSERT_FALSE(launched);
    EXPECT_EQ(launched.error().code, ErrorCode::kInvalidArgument);
    EXPECT_NE(launched.error().message.find("bias"), std::string::npos);
    const std::vector<MoeLaunch> launches = random_launches(1, 3);
    ASSERT_EQ(job.check(launches[0], job.run(launches)[0]), "");
  }
}

TEST(MoeDispatchCpu, AnAdaptivePartitionChangesNoBit) {
  for (const auto& [nodes, locals] : {std::pair{1u, 1u}, {1u, 3u}, {2u, 1u}, {2u, 2u}}) {
    MoeJobOptions options = two_by_two();
    options.nodes = nodes;
    options.locals = locals;
    options.shape.rows_max = 0;
    std::vector<MoeLaunch> launches = random_launches(32, nodes * 10 + locals);
    for (MoeLaunch& launch : launches) launch.uneven = false;
    std::vector<Workers RoleBlocks::*> roles{&RoleBlocks::pull};
    if (nodes * locals > 1) roles.push_back(&RoleBlocks::share);
    if (nodes > 1 && locals > 1) roles.push_back(&RoleBlocks::receive);
    expect_same_bits_as_threads_go_over<MoeJob>(
        options, roles, launches, [](const MoeRankResult& one, const MoeRankResult& other) {
          return one.y == other.y && one.rows == other.rows && one.offsets == other.offsets;
        });
    if (HasFatalFailure()) return;
  }
}

TEST(MoeDispatchCpu, ManyLaunchesBackToBackReadNoStaleFlag) {
  MoeJob job(two_by_two());
  NetworkThread network(job.cluster(), 6);
  const auto launches = random_launches(120, 6);
  const auto results = job.run(launches);
  for (std::size_t i = 0; i < launches.size(); ++i)
    ASSERT_EQ(job.check(launches[i], results[i]), "") << "launch " << i + 1;
  EXPECT_EQ(network.stop().complaint(), "");
}

TEST(MoeDispatchCpu, ChosenTilesAndSeveralPartsOfATable) {
  MoeJobOptions options;
  options.nodes = 2;
  options.shape = {600, 128, 136, 5, 3, 0};
  options.cpu.wait_timeout = std::chrono::seconds(120);
  options.cpu.blocks.plan = 2;
  MoeJob job(options);
  NetworkThread network(job.cluster(), 7);
  const std::vector<MoeLaunch> launches = {{Skew::kUniform, false, Mode::kFused, 0},
                                           {Skew::kOneExpert, false, Mode::kFused, 1},
                                           {Skew::kNone, false, Mode::kFused, 2}};
  const auto results = job.run(launches);
  for (std::size_t i = 0; i < launches.size(); ++i)
    ASSERT_EQ(job.check(launches[i], results[i]), "") << "launch " << i + 1;
}

TEST(MoeDispatchCpu, OneRankIsAGroupedProduct) {
  MoeJobOptions options;
  options.shape = {70, 64, 32, 8, 8, 0};
  MoeJob job(options);
  const auto launches = random_launches(5, 8);
  const auto results = job.run(launches);
  for (std::size_t i = 0; i < launches.size(); ++i) {
    ASSERT_EQ(job.check(launches[i], results[i]), "");
    EXPECT_EQ(results[i][0].stats->commands, 0u);
  }
}

TEST(MoeDispatchCpu, AutoRunsTheFormThatTheEstimateSaysIsFaster) {
  for (const bool overlap_pays : {false, true}) {
    MoeJobOptions options = two_by_two();
    // A network as slow as the product, and steps that cost nothing, or more than everything.
    options.cpu.rates = {1e6, 1e9, 1e5, 1, overlap_pays ? 1.0 : 1e9};
    MoeJob job(options);
    NetworkThread network(job.cluster(), 10);
    const std::vector<MoeLaunch> launches = {{Skew::kUniform, false, Mode::kAuto, 0}};
    const auto results = job.run(launches);
    ASSERT_EQ(job.check(launches[0], results[0]), "");
    for (const MoeRankResult& result : results[0]) {
      const LaunchStats& stats = *result.stats;
      EXPECT_EQ(stats.mode, overlap_pays ? Mode::kFused : Mode::kUnfused);
      EXPECT_EQ(stats.estimate.fused_ns < stats.estimate.unfused_ns, overlap_pays);
    }
  }
}

// The check itself must be able to fail.
class AFaultyNetwork
    : public ::testing::TestWithParam<std::tuple<std::uint32_t, bool NetworkOptions::*>> {};

TEST_P(AFaultyNetwork, IsSeen) {
  const auto [tokens, fault] = GetParam();
  MoeJobOptions options = two_by_two();
  options.shape = {tokens, 64, 40, 6, 6, 0};  // every expert, so every rank, needs every token
  MoeJob job(options);
  NetworkOptions faulty;
  faulty.*fault = true;
  NetworkThread network(job.cluster(), 9, faulty);
  const std::vector<MoeLaunch> launches = {{Skew::kUniform, false, Mode::kFused, 0}};
  const auto results = job.run(launches);
  EXPECT_NE(job.check(launches[0], results[0]), "");
}
// The first command of more than 64 bytes carries tokens; or routing. Half of it is lost, or the
// halves change places.
INSTANTIATE_TEST_SUITE_P(Tokens, AFaultyNetwork,
                         ::testing::Combine(::testing::Values(1u, 30u),
                                            ::testing::Values(&NetworkOptions::truncate_one_chunk,
                                                              &NetworkOptions::swap_in_one_chunk)));

}  // namespace
}  // namespace mk::kernels::testing
