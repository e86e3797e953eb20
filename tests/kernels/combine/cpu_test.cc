// GEMM+Combine on the CPU executor, ranks as threads of one process. Every element is within its
// bound, for every world, any skew of routing and of ranks, and the sums in the order that is said.
#include "kernels/ops/combine/cpu.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <random>
#include <set>
#include <string>
#include <vector>

#include "client/tools/numeric/elements.h"
#include "kernels/ops/combine/schedule.h"
#include "tests/kernels/combine/job.h"
#include "tests/kernels/support/every_world.h"
#include "tests/kernels/support/network.h"
#include "tests/kernels/support/routed_tests.h"
#include "tests/kernels/support/run_ranks.h"
#include "tests/kernels/support/same_bits.h"

namespace mk::kernels::testing {
namespace {

std::vector<CombineLaunchCase> random_launches(std::uint32_t count, std::uint64_t seed) {
  return random_routed_launches<CombineLaunchCase>(
      count, seed, [](CombineLaunchCase& launch, std::mt19937_64& random) {
        launch.residual = random() % 2 == 0;
      });
}

/// The bytes that rank `rank` sends: a header to each other node's rank of its rail, and a sum for
/// each of that rank's tokens that has an expert on this node.
std::uint64_t bytes_sent(const CombinePlan& plan, const std::vector<CombineRankInput>& inputs,
                         std::uint32_t rank) {
  const std::uint32_t locals = plan.locals;
  std::uint64_t bytes = 0;
  for (std::uint32_t peer = rank % locals; peer < inputs.size(); peer += locals) {
    if (peer == rank) continue;
    bytes += combine_header_bytes(locals);
    std::set<std::uint32_t> tokens;
    for (std::uint32_t local = 0; local < locals; ++local) {
      for (const MoeRow& row : inputs[rank / locals * locals + local].handle.rows) {
        if (row.rank == peer) tokens.insert(row.token);
      }
    }
    bytes += tokens.size() * plan.shape.hidden * plan.partial_bytes();
  }
  return bytes;
}

TEST_P(EveryWorld, GivesEveryTokenTheSumOfItsRows) {
  std::mt19937_64 random(seed());
  CombineJobOptions options;
  options.nodes = nodes();
  options.locals = locals();
  options.shape = {20,
                   40,
                   24,
                   static_cast<std::uint32_t>(3 + random() % 20),
                   static_cast<std::uint32_t>(1 + random() % 3),
                   random() % 2 == 0 ? CombinePartials::kElement : CombinePartials::kF32};
  options.dtype = (nodes() + locals()) % 2 == 0 ? DType::kBf16 : DType::kF16;
  options.tiling = {8, 16, 256, nodes() == 3 ? 1u : 0u};
  const auto blocks = [&] { return static_cast<std::uint32_t>(1 + random() % 2); };
  options.cpu.blocks = {blocks(), blocks(), blocks(), blocks(), 1, 1, blocks()};
  options.cpu.wait_timeout = std::chrono::seconds(120);
  options.cpu.b_layout = random() % 2 == 0 ? BLayout::kKN : BLayout::kNK;
  options.seed = seed();
  options.slot_count_log2 = 4;  // the smallest ring: credits run out
  CombineJob job(options);
  NetworkThread network(job.cluster(), seed());

  const auto launches = random_launches(6, seed());
  const auto results = job.run(launches, std::chrono::microseconds(3000));
  std::vector<std::vector<CombineRankInput>> inputs;
  for (const CombineLaunchCase& launch : launches) inputs.push_back(job.inputs(launch));
  expect_right_launches(job, network, launches, results,
                        [&](std::size_t i, std::uint32_t rank, const LaunchStats& stats) {
                          EXPECT_EQ(stats.m, inputs[i][rank].routing.tokens);
                          EXPECT_EQ(stats.network_bytes, bytes_sent(job.plan(), inputs[i], rank));
                        });
  // A bound far above what is seen would prove little.
  EXPECT_GT(job.worst(), 0.01);
}

INSTANTIATE_TEST_SUITE_P(Worlds, EveryWorld,
                         ::testing::Combine(::testing::Values(1u, 2u, 3u),
                                            ::testing::Values(1u, 2u, 3u, 4u)),
                         name_of_world);

CombineJobOptions two_by_two() {
  CombineJobOptions options;
  options.nodes = 2;
  options.locals = 2;
  options.shape = {30, 40, 24, 6, 2, CombinePartials::kElement};
  options.tiling = {8, 16, 128, 0};
  options.cpu.wait_timeout = std::chrono::seconds(120);
  return options;
}

TEST(CombineCpu, RepeatedRunsGiveTheSameBitsWhateverTheBlocks) {
  CombineJobOptions options = two_by_two();
  options.shape.hidden = 1100 * 2;  // more than a sum takes at a time
  options.shape.tokens_max = 12;
  options.tiling = {8, 256, 8192, 0};
  std::vector<std::vector<std::uint16_t>> first;
  for (const std::uint32_t blocks : {1u, 2u}) {
    options.cpu.blocks = {blocks, blocks, blocks, blocks, 1, 1, blocks};
    CombineJob job(options);
    NetworkThread network(job.cluster(), 5);
    std::vector<CombineLaunchCase> launches;
    for (std::uint32_t i = 0; i < 4; ++i)
      launches.push_back(
          {Skew::kRepeated, true, i % 2 == 0 ? Mode::kFused : Mode::kUnfused, 0, true});
    const auto results = job.run(launches, std::chrono::microseconds(1000));
    for (std::size_t i = 0; i < launches.size(); ++i) {
      ASSERT_EQ(job.check(launches[i], job.inputs(launches[i]), results[i]), "");
      for (std::uint32_t rank = 0; rank < job.size(); ++rank) {
        if (first.size() == rank) first.push_back(results[i][rank].out);
        EXPECT_EQ(results[i][rank].out, first[rank]) << "launch " << i + 1;
      }
    }
  }
}

TEST(CombineCpu, AnAdaptivePartitionChangesNoBit) {
  for (const auto& [nodes, locals] : {std::pair{1u, 1u}, {1u, 3u}, {2u, 1u}, {2u, 2u}}) {
    CombineJobOptions options = two_by_two();
    options.nodes = nodes;
    options.locals = locals;
    std::vector<CombineLaunchCase> launches = random_launches(32, nodes * 10 + locals);
    for (CombineLaunchCase& launch : launches) launch.uneven = false;
    std::vector<Workers RoleBlocks::*> roles{&RoleBlocks::receive};
    if (nodes > 1) roles.push_back(&RoleBlocks::reduce);
    expect_same_bits_as_threads_go_over<CombineJob>(
        options, roles, launches, [](const CombineRankResult& one, const CombineRankResult& other) {
          return one.out == other.out;
        });
    if (HasFatalFailure()) return;
  }
}

// Rows whose product is exact, so that every later rounding shows: the weight, the partial, the
// node's sum in slot order, the sum over the nodes in their order, the residual.
TEST(CombineCpu, AddsInSlotOrderThenInNodeOrderThenTheResidual) {
  for (const CombinePartials partials : {CombinePartials::kElement, CombinePartials::kF32}) {
    CombineJobOptions options;
    options.nodes = 3;
    options.locals = 2;
    options.shape = {16, 8, 8, 12, 6, partials};
    options.tiling = {8, 8, 64, 0};
    options.cpu.wait_timeout = std::chrono::seconds(120);
    CombineJob job(options);
    NetworkThread network(job.cluster(), 3);
    const CombineLaunchCase launch{Skew::kRepeated, false, Mode::kFused, 1, true};
    auto inputs = job.inputs(launch);
    std::vector<CombineRankResult> results(job.size());
    for (CombineRankInput& input : inputs) {
      std::fill(input.y.begin(), input.y.end(), std::uint16_t{0});
      for (std::size_t row = 0; row < input.handle.rows.size(); ++row)
        input.y[row * 8 + 3] = 0x3f80;  // one
    }
    run_ranks(job.size(), 1, 1, std::chrono::microseconds(0), [&](std::uint32_t rank, std::size_t) {
      results[rank] = job.launch(rank, inputs[rank], true, Mode::kFused);
      return bool{results[rank].stats};
    });
    const auto partial = [&](float value) {
      return partials == CombinePartials::kF32 ? value
                                               : tools::bf16_to_float(tools::float_to_bf16(value));
    };
    for (std::uint32_t rank = 0; rank < job.size(); ++rank) {
      ASSERT_TRUE(results[rank].stats) << results[rank].stats.error().message;
      const RankRouting& routing = inputs[rank].routing;
      for (std::uint32_t token = 0; token < routing.tokens; ++token) {
        for (std::uint32_t column = 0; column < 8; ++column) {
          float sum = 0;
          for (std::uint32_t node = 0; node < 3; ++node) {
            float of_node = 0;
            for (std::uint32_t slot = 0; slot < 6; ++slot) {
              const auto expert = static_cast<std::uint32_t>(routing.ids[token * 6 + slot]);
              if (expert / 4 != node) continue;  // two experts a rank
              const std::uint32_t there = expert / 2;
              const std::uint16_t weight =
                  job.weights(there)[std::size_t{expert % 2} * 64 + 3 * 8 + column];
              of_node += partial(tools::bf16_to_float(weight) * routing.weights[token * 6 + slot]);
            }
            sum += node == rank / 2 ? of_node : partial(of_node);
          }
          sum += tools::bf16_to_float(inputs[rank].residual[token * 8 + column]);
          ASSERT_EQ(results[rank].out[token * 8 + column], tools::float_to_bf16(sum))
              << fmt::format("rank {} token {} column {}", rank, token, column);
        }
      }
    }
  }
}

// A NaN in one token's rows is in that token's output, and nowhere else.
TEST(CombineCpu, ANaNReachesOnlyItsToken) {
  CombineJob job(two_by_two());
  NetworkThread network(job.cluster(), 4);
  std::vector<CombineLaunchCase> launches(3);
  for (std::size_t i = 0; i < launches.size(); ++i)
    launches[i] = {i == 1 ? Skew::kOneRank : Skew::kUniform, false, Mode::kFused, i, i == 2, i < 2};
  const auto results = job.run(launches);
  for (std::size_t i = 0; i < launches.size(); ++i) {
    // The reference has a NaN for all columns of those tokens, and numbers elsewhere.
    ASSERT_EQ(job.check(launches[i], job.inputs(launches[i]), results[i]), "") << "launch " << i;
  }
}

TEST(CombineCpu, TokensWithoutAnExpertGetZeroOrTheResidualBitByBit) {
  for (const bool residual : {false, true}) {
    CombineJob job(two_by_two());
    NetworkThread network(job.cluster(), 7);
    const CombineLaunchCase launch{Skew::kNone, false, Mode::kFused, 2, residual};
    auto inputs = job.inputs(launch);
    std::vector<CombineRankResult> results(job.size());
    for (CombineRankInput& input : inputs) input.residual[5] = 0x8000;  // minus zero
    run_ranks(job.size(), 1, 1, std::chrono::microseconds(0), [&](std::uint32_t rank, std::size_t) {
      results[rank] = job.launch(rank, inputs[rank], residual, Mode::kFused);
      return true;
    });
    for (std::uint32_t rank = 0; rank < job.size(); ++rank) {
      ASSERT_TRUE(results[rank].stats) << results[rank].stats.error().message;
      EXPECT_EQ(results[rank].out,
                residual ? inputs[rank].residual : std::vector<std::uint16_t>(30 * 40, 0));
    }
  }
}

TEST(CombineCpu, AsManySlotsAsExpertsAndFewerExpertsThanRanks) {
  for (const std::uint32_t experts : {3u, 1u, 8u}) {
    CombineJobOptions options = two_by_two();
    options.locals = 3;
    options.shape.experts = experts;
    options.shape.top_k = experts;
    CombineJob job(options);
    NetworkThread network(job.cluster(), experts);
    const auto launches = random_launches(6, experts);
    const auto results = job.run(launches);
    for (std::size_t i = 0; i < launches.size(); ++i)
      ASSERT_EQ(job.check(launches[i], job.inputs(launches[i]), results[i]), "") << i;
  }
}

TEST(CombineCpu, ManyLaunchesBackToBackReadNoStaleEntry) {
  CombineJob job(two_by_two());
  NetworkThread network(job.cluster(), 6);
  const auto launches = random_launches(100, 6);
  const auto results = job.run(launches);
  for (std::size_t i = 0; i < launches.size(); ++i)
    ASSERT_EQ(job.check(launches[i], job.inputs(launches[i]), results[i]), "")
        << "launch " << i + 1;
  EXPECT_EQ(network.stop().complaint(), "");
}

TEST(CombineCpu, ChosenTilesAndChunks) {
  CombineJobOptions options;
  options.nodes = 2;
  options.shape = {200, 264, 136, 5, 3, CombinePartials::kF32};
  options.cpu.wait_timeout = std::chrono::seconds(120);
  CombineJob job(options);
  NetworkThread network(job.cluster(), 7);
  const std::vector<CombineLaunchCase> launches = {{Skew::kUniform, false, Mode::kFused, 0, true},
                                                   {Skew::kOneExpert, false, Mode::kFused, 1},
                                                   {Skew::kSparse, true, Mode::kUnfused, 2}};
  const auto results = job.run(launches);
  for (std::size_t i = 0; i < launches.size(); ++i)
    ASSERT_EQ(job.check(launches[i], job.inputs(launches[i]), results[i]), "")
        << "launch " << i + 1;
}

}  // namespace
}  // namespace mk::kernels::testing
