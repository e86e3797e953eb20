// GEMM+AllReduce on the CPU executor, ranks as threads of one process: right results for every
// world, whatever the skew.
#include "kernels/cpu/gemm_ar_cpu.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/gemm_ar/schedule.h"
#include "tests/kernels/support/gemm_ar_job.h"
#include "tests/kernels/support/network.h"

namespace mk::kernels::testing {
namespace {

std::vector<LaunchPlan> random_launches(std::uint32_t count, std::uint32_t m_max,
                                        std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<LaunchPlan> launches;
  for (std::uint32_t i = 0; i < count; ++i) {
    LaunchPlan launch;
    launch.m = i == 0 ? m_max : static_cast<std::uint32_t>(1 + random() % m_max);
    launch.mode = random() % 3 == 0 ? Mode::kUnfused : Mode::kFused;
    launch.into_c = random() % 2 == 0;
    launch.padded = random() % 2 == 0;
    launch.inputs = i;
    launches.push_back(launch);
  }
  return launches;
}

class EveryWorld : public ::testing::TestWithParam<std::tuple<std::uint32_t, std::uint32_t>> {
 protected:
  std::uint32_t nodes() const { return std::get<0>(GetParam()); }
  std::uint32_t locals() const { return std::get<1>(GetParam()); }
  std::uint64_t seed() const { return nodes() * 100 + locals(); }
};

TEST_P(EveryWorld, GivesEveryRankTheSumForChangingM) {
  std::mt19937_64 random(seed());
  JobOptions options;
  options.nodes = nodes();
  options.locals = locals();
  options.max = {37, 40 + static_cast<std::uint32_t>(random() % 40), 19};
  options.dtype = (nodes() + locals()) % 2 == 0 ? DType::kBf16 : DType::kF16;
  options.tiling = {8, 16, 600, nodes() == 3 ? 1u : 0u};
  const auto blocks = [&] { return static_cast<std::uint32_t>(1 + random() % 2); };
  options.cpu.blocks.compute = blocks();
  options.cpu.blocks.reduce = blocks();
  options.cpu.blocks.send = blocks();
  options.cpu.blocks.receive = blocks();
  options.cpu.wait_timeout = std::chrono::seconds(120);
  options.cpu.b_layout = random() % 2 == 0 ? BLayout::kKN : BLayout::kNK;
  options.seed = seed();
  options.slot_count_log2 = 4;  // the smallest ring: credits run out
  GemmArJob job(options);
  NetworkThread network(job.cluster(), seed());

  const auto launches = random_launches(12, options.max.m, seed());
  const auto results = job.run(launches, std::chrono::microseconds(3000));
  std::vector<std::uint64_t> bytes(job.size(), 0);
  for (std::size_t i = 0; i < launches.size(); ++i) {
    ASSERT_EQ(job.check(launches[i], results[i]), "")
        << "launch " << i + 1 << ", m = " << launches[i].m;
    for (std::uint32_t rank = 0; rank < job.size(); ++rank) {
      const LaunchStats& stats = *results[i][rank].stats;
      const GemmArSchedule schedule(job.plan(), launches[i].m);
      EXPECT_EQ(stats.epoch, i + 1);
      EXPECT_EQ(stats.m, launches[i].m);
      EXPECT_EQ(stats.mode, launches[i].mode);
      EXPECT_EQ(stats.network_bytes, schedule.network_bytes(rank % locals()));
      bytes[rank] += stats.network_bytes;
    }
  }
  Network& seen = network.stop();
  EXPECT_EQ(seen.complaint(), "");
  for (std::uint32_t rank = 0; rank < job.size(); ++rank)
    EXPECT_EQ(seen.bytes_of(rank), bytes[rank]);
  // A bound far above what is seen would prove little.
  EXPECT_GT(job.worst(), 0.01);
}

INSTANTIATE_TEST_SUITE_P(Worlds, EveryWorld,
                         ::testing::Combine(::testing::Values(1u, 2u, 3u, 4u),
                                            ::testing::Values(1u, 2u, 3u, 4u, 8u)),
                         [](const auto& world) {
                           return fmt::format("{}x{}", std::get<0>(world.param),
                                              std::get<1>(world.param));
                         });

JobOptions two_by_two() {
  JobOptions options;
  options.nodes = 2;
  options.locals = 2;
  options.max = {40, 48, 16};
  options.tiling = {8, 16, 600, 0};
  options.cpu.wait_timeout = std::chrono::seconds(120);
  return options;
}

TEST(GemmArCpu, RepeatedRunsGiveTheSameBits) {
  JobOptions options = two_by_two();
  options.max.k = 700;
  options.cpu.blocks.compute = 2;
  GemmArJob job(options);
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
    EXPECT_EQ(results[i][0].c, results[0][0].c) << "launch " << i + 1;
  }
}

TEST(GemmArCpu, ManyLaunchesBackToBackReadNoStaleFlag) {
  JobOptions options = two_by_two();
  options.max = {24, 24, 5};
  options.tiling = {4, 8, 64, 0};
  GemmArJob job(options);
  NetworkThread network(job.cluster(), 6);
  const auto launches = random_launches(150, options.max.m, 6);
  const auto results = job.run(launches);
  for (std::size_t i = 0; i < launches.size(); ++i) {
    ASSERT_EQ(job.check(launches[i], results[i]), "")
        << "launch " << i + 1 << ", m = " << launches[i].m;
  }
  EXPECT_EQ(network.stop().complaint(), "");
}

TEST(GemmArCpu, ChosenTilesAndALongerK) {
  JobOptions options;
  options.nodes = 2;
  options.max = {130, 264, 1500};
  options.cpu.wait_timeout = std::chrono::seconds(120);
  for (DType dtype : {DType::kBf16, DType::kF16}) {
    options.dtype = dtype;
    GemmArJob job(options);
    NetworkThread network(job.cluster(), 7);
    const std::vector<LaunchPlan> launches = {{130, Mode::kFused, true, false, 0},
                                              {1, Mode::kFused, true, true, 1}};
    const auto results = job.run(launches);
    for (std::size_t i = 0; i < launches.size(); ++i)
      ASSERT_EQ(job.check(launches[i], results[i]), "");
  }
}

TEST(GemmArCpu, OneRankIsAPlainProduct) {
  JobOptions options;
  options.max = {50, 33, 64};
  GemmArJob job(options);
  const auto launches = random_launches(5, 50, 8);
  const auto results = job.run(launches);
  for (std::size_t i = 0; i < launches.size(); ++i) {
    ASSERT_EQ(job.check(launches[i], results[i]), "");
    EXPECT_EQ(results[i][0].stats->commands, 0u);
  }
}

// The check itself must be able to fail.
TEST(GemmArCpu, AChunkThatDidNotMoveIsSeen) {
  JobOptions options = two_by_two();
  GemmArJob job(options);
  NetworkOptions faulty;
  faulty.truncate_one_chunk = true;
  NetworkThread network(job.cluster(), 9, faulty);
  const auto launches = random_launches(2, options.max.m, 9);
  const auto results = job.run(launches);
  EXPECT_NE(job.check(launches[0], results[0]), "");
}

}  // namespace
}  // namespace mk::kernels::testing
