// Every operator on the CPU executor tells people of a launch (shm/progress.h): its shape, and how
// many tiles and chunks there are. When it has ended, so many are done.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <string>

#include "shm/host/progress_sizes.h"
#include "tests/kernels/ag_gemm/job.h"
#include "tests/kernels/combine/job.h"
#include "tests/kernels/moe/job.h"
#include "tests/kernels/ring/job.h"
#include "tests/kernels/support/gemm_sum_job.h"
#include "tests/kernels/support/network.h"

namespace mk::kernels::testing {
namespace {

using ::testing::ElementsAre;

/// 2 x 2 ranks, two blocks of each role.
template <class Options>
Options options_of(std::uint32_t nodes) {
  Options options;
  options.nodes = nodes;
  options.locals = 2;
  options.cpu.blocks = {2, 2, 2, 2, 2, 2, 2};
  options.cpu.wait_timeout = std::chrono::seconds(60);
  return options;
}

/// After a launch of all ranks.
template <class Job, class Launch>
void expect_all_done(Job& job, const Launch& launch, std::string_view op,
                     const shm::ProgressSizes& sizes) {
  NetworkThread network(job.cluster(), 1);
  for (std::uint32_t round = 1; round <= 2; ++round) {
    ASSERT_EQ(job.check(launch, job.run({launch})[0]), "");
    for (std::uint32_t rank = 0; rank < job.size(); ++rank) {
      SCOPED_TRACE(::testing::Message() << op << ", rank " << rank << ", launch " << round);
      const shm::Progress& words = job.cluster().rank(rank).progress;
      EXPECT_EQ(shm::kProgressOperators[words.op], op);
      EXPECT_EQ(words.epoch, round);
      EXPECT_EQ(shm::sizes_of(words)[2], sizes[2]);
      EXPECT_EQ(shm::sizes_of(words)[3], sizes[3]);
      EXPECT_GT(words.tiles, 0u);
      EXPECT_EQ(words.tiles_done, words.tiles);
      EXPECT_EQ(words.chunks != 0, job.cluster().shape().nodes > 1);
      EXPECT_EQ(words.chunks_done, words.chunks);
      for (const std::uint64_t word : words.roles)
        EXPECT_EQ(shm::decode_role(word).running, 0u) << "nobody runs";
    }
    EXPECT_EQ(shm::sizes_of(job.cluster().rank(0).progress), sizes);
  }
  EXPECT_EQ(network.stop().complaint(), "");
}

class Told : public ::testing::TestWithParam<std::uint32_t> {};

TEST_P(Told, AgGemm) {
  auto options = options_of<AgGemmJobOptions>(GetParam());
  options.max = {40, 24, 13};
  options.tiling = {4, 8, 64, 2};
  AgGemmJob job(options);
  expect_all_done(job, AgGemmLaunchPlan{.m = 37}, "ag_gemm", {24, 13, 0, 0});
}

TEST_P(Told, GemmSums) {
  auto options = options_of<JobOptions>(GetParam());
  options.max = {40, 24, 13};
  options.tiling = {4, 8, 128, 2};
  LaunchPlan launch;
  launch.m = 37;
  launch.into_c = true;
  GemmSumJob<GemmArOp> all_reduce(options);
  expect_all_done(all_reduce, launch, "gemm_ar", {24, 13, 0, 0});
  GemmSumJob<GemmRsOp> reduce_scatter(options);
  expect_all_done(reduce_scatter, launch, "gemm_rs", {24, 13, 0, 0});
}

// Only the routing says how many tiles there are.
TEST_P(Told, Moe) {
  auto options = options_of<MoeJobOptions>(GetParam());
  options.shape = {20, 24, 16, 6, 2};
  options.tiling = {8, 8, 128, 2};
  MoeJob job(options);
  expect_all_done(job, MoeLaunch{{.uneven = false}}, "moe_dispatch", {16, 24, 6, 2});
  EXPECT_EQ(job.cluster().rank(0).progress.m, 20u) << "tokens";
}

TEST_P(Told, Combine) {
  auto options = options_of<CombineJobOptions>(GetParam());
  options.shape = {20, 24, 16, 6, 2, CombinePartials::kElement};
  options.tiling = {8, 8, 128, 2};
  CombineJob job(options);
  expect_all_done(job, CombineLaunchCase{{.uneven = false}}, "gemm_combine", {24, 16, 6, 2});
  EXPECT_EQ(job.cluster().rank(0).progress.m, 20u) << "tokens";
}

// With a mask most tiles of queries see some of the keys only.
TEST_P(Told, Ring) {
  for (const bool causal : {false, true}) {
    auto options = options_of<RingJobOptions>(GetParam());
    options.shape = {60, 2, 1, 64, causal};
    options.tiling = {5, 7, 700, 2, 2};
    RingJob job(options);
    RingLaunch launch;
    launch.seq = 53;
    expect_all_done(job, launch, "ring_attention", {2, 1, 64, 1});
    EXPECT_EQ(job.cluster().rank(0).progress.m, 53u);
  }
}

INSTANTIATE_TEST_SUITE_P(Nodes, Told, ::testing::Values(1u, 2u));

}  // namespace
}  // namespace mk::kernels::testing
