/// \file
/// What every product summed over ranks must do on the CPU executor, ranks as threads of one
/// process: right results for every world, whatever the skew. `GemmSum`, of an operator's struct
/// (gemm_sum_job.h).
#pragma once

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/kernels/support/gemm_sum_job.h"
#include "tests/kernels/support/network.h"

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

inline JobOptions two_by_two() {
  JobOptions options;
  options.nodes = 2;
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
        if (known && stats.estimate != estimate(work, job.options().cpu.rates))
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
  for (std::uint32_t nodes = 1; nodes <= 4; ++nodes) {
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

TYPED_TEST_P(GemmSum, RepeatedRunsGiveTheSameBits) {
  JobOptions options = two_by_two();
  options.max.k = 700;
  options.cpu.blocks.compute = 2;
  GemmSumJob<TypeParam> job(options);
  NetworkThread network(job.cluster(), 5);
  std::vector<LaunchPlan> launches;
  for (std::uint32_t i = 0; i < 8; ++i) {
    LaunchPlan launch;
    launch.m = 37;
    launch.mode = i % 2 == 0 ? Mode::kFused : Mode::kUnfused;
    launches.push_back(launch);
  }
  const auto results = job.run(launches, std::chrono::microseconds(1000));
  for (std::size_t i = 0; i < launches.size(); ++i) {
    ASSERT_EQ(job.check(launches[i], results[i]), "");
    for (std::uint32_t rank = 0; rank < job.size(); ++rank)
      EXPECT_EQ(results[i][rank].c, results[0][rank].c) << "launch " << i + 1;
  }
}

TYPED_TEST_P(GemmSum, ManyLaunchesBackToBackReadNoStaleFlag) {
  JobOptions options = two_by_two();
  options.max = {24, 24, 5};
  options.tiling = {4, 8, 64, 0};
  GemmSumJob<TypeParam> job(options);
  ASSERT_EQ(this->run(job, random_launches(150, options.max.m, 6), {}, {}, 6), "");
}

TYPED_TEST_P(GemmSum, ChosenTilesAndALongerK) {
  JobOptions options;
  options.nodes = 2;
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
  JobOptions options = two_by_two();
  for (const auto& [step_ns, cheaper] : {std::pair{1.0, Mode::kFused}, {1e9, Mode::kUnfused}}) {
    options.cpu.rates = {1e9, 1e9, 1e9, 1, step_ns};
    GemmSumJob<TypeParam> job(options);
    const World& world = job.cluster().rank(3).world;
    const Estimate largest =
        estimate(job.plan().work(world, options.max.m, options.max.k), options.cpu.rates);
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
  GemmSumJob<TypeParam> job(two_by_two());
  NetworkOptions faulty;
  faulty.truncate_one_chunk = true;
  EXPECT_THAT(this->run(job, random_launches(2, 40, 9), faulty, {}, 9), kWrongElement);
}

TYPED_TEST_P(GemmSum, TilesThatChangedPlacesAreSeen) {
  GemmSumJob<TypeParam> job(two_by_two());
  NetworkOptions faulty;
  faulty.swap_in_one_chunk = true;
  EXPECT_THAT(this->run(job, random_launches(2, 40, 9), faulty, {}, 9), kWrongElement);
}

REGISTER_TYPED_TEST_SUITE_P(GemmSum, EveryWorldGetsTheSumForChangingM, RepeatedRunsGiveTheSameBits,
                            ManyLaunchesBackToBackReadNoStaleFlag, ChosenTilesAndALongerK,
                            OneRankIsAPlainProduct, AutoRunsTheCheaperForm,
                            TilesThatChangedPlacesAreSeen, AChunkThatDidNotMoveIsSeen);

}  // namespace mk::kernels::testing
