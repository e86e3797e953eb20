/// \file
/// What every product summed over ranks must do on the CPU executor, ranks as threads of one
/// process: right results for every world, whatever the skew. `GemmSum`, of an operator's struct
/// (gemm_sum_job.h).
#pragma once

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/plan/account.h"
#include "tests/kernels/support/gemm_sum_job.h"
#include "tests/kernels/support/network.h"
#include "tests/kernels/support/reference.h"
#include "tests/kernels/support/run_ranks.h"
#include "tests/kernels/support/same_bits.h"

namespace mk::kernels::testing {

inline std::vector<LaunchPlan> random_launches(std::uint32_t count, std::uint32_t m_max,
                                               std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<LaunchPlan> launches;
  for (std::uint32_t i = 0; i < count; ++i) {
    LaunchPlan launch;
    launch.m = i == 0 ? m_max : static_cast<std::uint32_t>(1 + random() % m_max);
    launch.mode = random() % 3 == 0 ? Mode::kUnfused : Mode::kFused;
    launch.mixed_modes = random() % 3 == 0;
    launch.into_c = random() % 2 == 0;
    launch.padded = random() % 2 == 0;
    launch.inputs = i;
    launches.push_back(launch);
  }
  return launches;
}

/// Two nodes of two ranks, or the nodes that the form needs.
template <class Op>
JobOptions two_by_two() {
  JobOptions options;
  options.nodes = std::max(2u, Op::kNodesLeast);
  options.locals = 2;
  options.max = {40, 48, 16};
  options.tiling = {8, 16, 600, 0};
  options.cpu.wait_timeout = std::chrono::seconds(120);
  return options;
}

template <class Op>
class GemmSum : public ::testing::Test {
 protected:
  /// Runs and checks all launches; empty, or the first thing that is wrong.
  static std::string run(GemmSumJob<Op>& job, const std::vector<LaunchPlan>& launches,
                         const NetworkOptions& network_options, std::chrono::microseconds pause_max,
                         std::uint64_t seed) {
    NetworkThread network(job.cluster(), seed, network_options);
    const auto results = job.run(launches, pause_max);
    std::vector<std::uint64_t> bytes(job.size(), 0);
    for (std::size_t i = 0; i < launches.size(); ++i) {
      const LaunchPlan& launch = launches[i];
      const auto wrong = [&](const std::string& what) {
        return fmt::format("launch {}, m = {}: {}", i + 1, launch.m, what);
      };
      if (const std::string text = job.check(launch, results[i]); !text.empty()) return wrong(text);
      for (std::uint32_t rank = 0; rank < job.size(); ++rank) {
        const LaunchStats& stats = *results[i][rank].stats;
        const World& world = job.cluster().rank(rank).world;
        const LaunchWork work = job.plan().work(world, launch.m, job.inputs(rank, launch).k);
        if (work.network_bytes != static_cast<double>(stats.network_bytes) ||
            work.commands != stats.commands)
          return wrong(fmt::format("rank {} wrote {} commands", rank, stats.commands));
        const Mode mode = launch.mode_of(rank);
        const Mode expected = mode == Mode::kAuto ? stats.estimate.cheaper() : mode;
        const bool known = job.options().cpu.rates.flops_per_s != 0;  // all of them, then
        if (known && stats.estimate != plan::expected(work, job.options().cpu.rates))
          return wrong("the estimate is of another launch");
        if (stats.epoch != i + 1 || stats.m != launch.m || stats.mode != expected)
          return wrong("the statistics are of another launch");
        if (stats.network_bytes != Op::network_bytes(job.plan(), world, launch.m))
          return wrong(fmt::format("rank {} sent {} bytes", rank, stats.network_bytes));
        bytes[rank] += stats.network_bytes;
      }
    }
    Network& seen = network.stop();
    for (std::uint32_t rank = 0; rank < job.size(); ++rank) {
      if (seen.bytes_of(rank) != bytes[rank]) return "the network saw other bytes";
    }
    return seen.complaint();
  }
};
TYPED_TEST_SUITE_P(GemmSum);

TYPED_TEST_P(GemmSum, EveryWorldGetsTheSumForChangingM) {
  for (std::uint32_t nodes = TypeParam::kNodesLeast; nodes <= TypeParam::kNodesLeast / 2 + 4;
       ++nodes) {
    for (std::uint32_t locals : {1u, 2u, 3u, 4u, 8u}) {
      const std::uint64_t seed = nodes * 100 + locals;
      std::mt19937_64 random(seed);
      JobOptions options;
      options.nodes = nodes;
      options.locals = locals;
      options.max = {37, 40 + static_cast<std::uint32_t>(random() % 40), 19};
      options.dtype = (nodes + locals) % 2 == 0 ? DType::kBf16 : DType::kF16;
      options.tiling = {8, 16, 600, nodes == 3 ? 1u : 0u};
      const auto blocks = [&] { return static_cast<std::uint32_t>(1 + random() % 2); };
      options.cpu.blocks.compute = blocks();
      options.cpu.blocks.reduce = blocks();
      options.cpu.blocks.send = blocks();
      options.cpu.blocks.receive = blocks();
      options.cpu.adaptive = random() % 2 == 0;
      options.cpu.wait_timeout = std::chrono::seconds(120);
      options.cpu.b_layout = random() % 2 == 0 ? BLayout::kKN : BLayout::kNK;
      options.seed = seed;
      options.slot_count_log2 = 4;  // the smallest ring: credits run out
      GemmSumJob<TypeParam> job(options);
      NetworkOptions network;
      network.immediates = random() % 2 == 0;  // both delivery contracts
      ASSERT_EQ(this->run(job, random_launches(12, options.max.m, seed), network,
                          std::chrono::microseconds(3000), seed),
                "")
          << nodes << " x " << locals;
      // A bound far above what is seen would prove little.
      EXPECT_GT(job.worst(), 0.01) << nodes << " x " << locals;
    }
  }
}

// Every activation, with and without a bias, and both types of partial sums, in worlds of every
// kind: one rank, one node, nodes of one rank, nodes of several.
TYPED_TEST_P(GemmSum, EveryEpilogueIsAppliedOnceToTheWholeSum) {
  std::uint64_t seed = 0;
  for (const auto& [least, locals] : {std::pair{1u, 1u}, {1u, 2u}, {1u, 3u}, {3u, 1u}, {2u, 2u}}) {
    const std::uint32_t nodes = std::max(least, TypeParam::kNodesLeast);
    for (std::uint32_t i = 0; i < 10; ++i) {
      JobOptions options;
      options.nodes = nodes;
      options.locals = locals;
      options.max = {21, 42, 17};
      options.dtype = seed % 2 == 0 ? DType::kBf16 : DType::kF16;
      options.tiling = {8, 16, 600, 0};
      options.result.epilogue = {static_cast<Activation>(i % 5), i >= 5};
      options.result.partials = seed / 2 % 2 == 0 ? Partials::kF32 : Partials::kElement;
      options.cpu.wait_timeout = std::chrono::seconds(120);
      options.seed = ++seed;
      GemmSumJob<TypeParam> job(options);
      ASSERT_EQ(this->run(job, random_launches(3, options.max.m, seed), {}, {}, seed), "")
          << nodes << " x " << locals << ", " << name_of(options.result.epilogue.activation) << ", "
          << name_of(options.result.partials);
    }
  }
}

// 40000 + 40000 on rank 0 and -40000 - 40000 on rank 1: in f16 infinities, whose sum is a NaN.
TYPED_TEST_P(GemmSum, PartialSumsInFp32DoNotOverflow) {
  JobOptions options;
  options.locals = 2;
  options.max = {8, 8, 2};
  options.dtype = DType::kF16;
  options.cpu.count_nonfinite = true;
  for (const Partials partials : {Partials::kElement, Partials::kF32}) {
    options.result.partials = partials;
    GemmSumJob<TypeParam> job(options);
    std::vector<std::uint64_t> nonfinite(2);
    std::vector<std::vector<std::uint16_t>> c(2);
    run_ranks(2, 1, 1, {}, [&](std::uint32_t rank, std::size_t) {
      const std::uint32_t k = 2 + rank;
      std::vector<std::uint16_t> a(8 * k, 0);
      const std::vector<std::uint16_t> b(k * 8, from_float(options.dtype, 200));
      for (std::uint32_t row = 0; row < 8; ++row) {
        a[row * k] = a[row * k + 1] = from_float(options.dtype, rank == 0 ? 200 : -200);
      }
      c[rank].resize(8 * 8);
      const auto stats =
          job.op(rank).launch(a.data(), k, b.data(), 8, c[rank].data(), 8, 8, Mode::kFused);
      if (stats) nonfinite[rank] = stats->nonfinite_partials;
      return stats.has_value();
    });
    const bool f32 = partials == Partials::kF32;
    EXPECT_EQ(nonfinite[0] + nonfinite[1], f32 ? 0u : 2u * 8 * 8);
    EXPECT_EQ(to_double(options.dtype, c[0][0]) == 0, f32);
  }
}

// What the ranks must agree on, and what a launch must bring.
TYPED_TEST_P(GemmSum, AnEpilogueIsPartOfThePlan) {
  using Plan = typename TypeParam::Plan;
  const auto plan = [](const GemmResult& result, std::uint32_t n = 48) {
    return Plan::make(2, 2, {64, n, 0}, DType::kBf16, {}, result);
  };
  const GemmResult wanted[] = {{},
                               {{Activation::kRelu}},
                               {{Activation::kNone, true}},
                               {{Activation::kNone}, Partials::kF32}};
  std::vector<std::uint64_t> fingerprints;
  for (const GemmResult& result : wanted) fingerprints.push_back(plan(result)->fingerprint());
  std::sort(fingerprints.begin(), fingerprints.end());
  EXPECT_EQ(std::unique(fingerprints.begin(), fingerprints.end()), fingerprints.end());
  EXPECT_EQ(plan({{Activation::kGatedSilu}})->result_columns(), 24u);
  EXPECT_THAT(plan({{Activation::kGatedSilu}}, 41).error().message,
              ::testing::HasSubstr("n = 41 is odd"));
  EXPECT_EQ(plan({{static_cast<Activation>(5)}}).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(plan({{}, static_cast<Partials>(2)}).error().code, ErrorCode::kInvalidArgument);
  // C's part of a gated tile begins at a multiple of eight columns.
  const auto gated =
      Plan::make(1, 2, {64, 976, 0}, DType::kBf16, {16, 248, 0, 0}, {{Activation::kGatedSilu}});
  EXPECT_EQ(gated->tile_n, 256u);
  const TileGrid grid(64, 976, gated->tile_m, gated->tile_n, gated->epilogue.column_step());
  EXPECT_EQ(grid.tile_cols() % 16, 0u);
  EXPECT_LE(grid.tile_cols(), gated->tile_n);
  // Twice the bytes.
  const World world{2, 2, 0, 1};
  const auto sent = [&](const GemmResult& result) {
    return plan(result)->work(world, 64, 8).network_bytes - kBankHeaderBytes;
  };
  EXPECT_EQ(sent({{}, Partials::kF32}), 2 * sent({}));

  JobOptions options;
  options.max = {8, 8, 8};
  for (const bool bias : {false, true}) {
    options.result.epilogue.bias = bias;
    GemmSumJob<TypeParam> job(options);
    const std::vector<std::uint16_t> ones(64, 0x3f80);
    std::vector<std::uint16_t> c(64);
    const auto error = job.op(0)
                           .launch(ones.data(), 8, ones.data(), 8, c.data(), 8, 8, Mode::kFused,
                                   bias ? nullptr : ones.data())
                           .error();
    EXPECT_THAT(error.message, ::testing::HasSubstr(bias ? "bias is null" : "bias is given"));
  }
}

TYPED_TEST_P(GemmSum, RepeatedRunsGiveTheSameBits) {
  JobOptions options = two_by_two<TypeParam>();
  options.max.k = 700;
  options.cpu.blocks.compute = 2;
  GemmSumJob<TypeParam> job(options);
  LaunchPlan launch;
  launch.m = 37;
  expect_same_bits_each_time(job, launch, 8, &RankResult::c);
}

TYPED_TEST_P(GemmSum, AnAdaptivePartitionChangesNoBit) {
  for (const std::uint32_t locals : {1u, 2u, 3u}) {
    JobOptions options = two_by_two<TypeParam>();
    options.locals = locals;
    options.max = {120, 96, 200};
    options.tiling = {8, 16, 600, 0};
    std::vector<LaunchPlan> launches = random_launches(5, options.max.m, locals);
    for (LaunchPlan& launch : launches) launch.mode = Mode::kFused;
    expect_same_bits_in_any_partition<GemmSumJob<TypeParam>>(
        options, &RoleBlocks::reduce, launches,
        [](const JobOptions& run, const LaunchPlan& launch, std::uint32_t rank,
           const LaunchStats& stats) {
          const bool adapts =
              run.cpu.adaptive && run.locals > 1 && launch.mode_of(rank) == Mode::kFused;
          const RoleBlocks& blocks = run.cpu.blocks;
          const std::uint32_t threads = blocks.compute.count() + blocks.reduce.count();
          EXPECT_LE(stats.partition.first, adapts ? threads : 0);
          if (!adapts) {
            EXPECT_EQ(stats.partition.moves + stats.partition.turns, 0u);
          }
        });
    if (this->HasFatalFailure()) return;
  }
}

TYPED_TEST_P(GemmSum, ManyLaunchesBackToBackReadNoStaleFlag) {
  JobOptions options = two_by_two<TypeParam>();
  options.max = {24, 24, 5};
  options.tiling = {4, 8, 64, 0};
  GemmSumJob<TypeParam> job(options);
  ASSERT_EQ(this->run(job, random_launches(150, options.max.m, 6), {}, {}, 6), "");
}

TYPED_TEST_P(GemmSum, ChosenTilesAndALongerK) {
  JobOptions options;
  options.nodes = std::max(2u, TypeParam::kNodesLeast);
  options.max = {130, 264, 1500};
  options.cpu.wait_timeout = std::chrono::seconds(120);
  for (DType dtype : {DType::kBf16, DType::kF16}) {
    options.dtype = dtype;
    GemmSumJob<TypeParam> job(options);
    const std::vector<LaunchPlan> launches = {{130, Mode::kFused, true, false, 0},
                                              {1, Mode::kFused, true, true, 1}};
    ASSERT_EQ(this->run(job, launches, {}, {}, 7), "");
  }
}

TYPED_TEST_P(GemmSum, OneRankIsAPlainProduct) {
  JobOptions options;
  options.max = {50, 33, 64};
  GemmSumJob<TypeParam> job(options);
  const auto launches = random_launches(5, 50, 8);
  const auto results = job.run(launches);
  for (std::size_t i = 0; i < launches.size(); ++i) {
    ASSERT_EQ(job.check(launches[i], results[i]), "");
    EXPECT_EQ(results[i][0].stats->commands, 0u);
  }
}

// The estimate chooses, each rank for itself, and the statistics say what ran (see `run`).
TYPED_TEST_P(GemmSum, AutoRunsTheCheaperForm) {
  JobOptions options = two_by_two<TypeParam>();
  for (const auto& [step_ns, cheaper] : {std::pair{1.0, Mode::kFused}, {1e9, Mode::kUnfused}}) {
    options.cpu.rates = {1e9, 1e9, 1e9, 1, step_ns};
    GemmSumJob<TypeParam> job(options);
    const World& world = job.cluster().rank(3).world;
    const Estimate largest =
        plan::expected(job.plan().work(world, options.max.m, options.max.k), options.cpu.rates);
    EXPECT_EQ(largest.cheaper(), cheaper);
    std::vector<LaunchPlan> launches = random_launches(12, options.max.m, 10);
    for (LaunchPlan& launch : launches) launch.mode = Mode::kAuto;
    ASSERT_EQ(this->run(job, launches, {}, {}, 10), "");
  }
}

// The check itself must be able to fail: an element out of its bound, or two ranks with other bits.
inline const auto kWrongElement =
    ::testing::AnyOf(::testing::HasSubstr("element ["), ::testing::HasSubstr("has other bits"));

TYPED_TEST_P(GemmSum, AChunkThatDidNotMoveIsSeen) {
  GemmSumJob<TypeParam> job(two_by_two<TypeParam>());
  NetworkOptions faulty;
  faulty.truncate_one_chunk = true;
  EXPECT_THAT(this->run(job, random_launches(2, 40, 9), faulty, {}, 9), kWrongElement);
}

TYPED_TEST_P(GemmSum, TilesThatChangedPlacesAreSeen) {
  GemmSumJob<TypeParam> job(two_by_two<TypeParam>());
  NetworkOptions faulty;
  faulty.swap_in_one_chunk = true;
  EXPECT_THAT(this->run(job, random_launches(2, 40, 9), faulty, {}, 9), kWrongElement);
}

REGISTER_TYPED_TEST_SUITE_P(GemmSum, EveryWorldGetsTheSumForChangingM,
                            EveryEpilogueIsAppliedOnceToTheWholeSum, PartialSumsInFp32DoNotOverflow,
                            AnEpilogueIsPartOfThePlan, RepeatedRunsGiveTheSameBits,
                            AnAdaptivePartitionChangesNoBit, ManyLaunchesBackToBackReadNoStaleFlag,
                            ChosenTilesAndALongerK, OneRankIsAPlainProduct, AutoRunsTheCheaperForm,
                            TilesThatChangedPlacesAreSeen, AChunkThatDidNotMoveIsSeen);

}  // namespace mk::kernels::testing
