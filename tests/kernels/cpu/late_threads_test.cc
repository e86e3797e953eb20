// Every operator on the CPU executor while threads fall behind at any point of a launch, for up to
// a second: blocks, ranks before a launch, the network. Hundreds of launches with changing sizes
// and inputs follow each other without a barrier. A stale flag or a bank used again too early gives
// a wrong element, a wait without an end a time-out.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "tests/kernels/ag_gemm/job.h"
#include "tests/kernels/combine/job.h"
#include "tests/kernels/moe/job.h"
#include "tests/kernels/ring/job.h"
#include "tests/kernels/support/gemm_sum_job.h"
#include "tests/kernels/support/network.h"
#include "tests/kernels/support/random_stops.h"

namespace mk::kernels::testing {
namespace {

/// What all jobs here have: 2 x 2 ranks, two blocks of each role.
template <class Options>
Options options_of(std::uint64_t seed) {
  Options options;
  options.nodes = 2;
  options.locals = 2;
  options.cpu.blocks = {2, 2, 2, 2, 2, 2, 2};
  options.cpu.wait_timeout = std::chrono::seconds(60);
  options.seed = seed;
  return options;
}

Mode random_mode(std::mt19937_64& random) {
  return random() % 4 == 0 ? Mode::kUnfused : Mode::kFused;
}

/// How each operator's job is made, and a launch of it.
template <class Op>
struct GemmSumCase {
  using Job = GemmSumJob<Op>;
  static Job job(std::uint32_t banks, std::uint64_t seed) {
    auto options = options_of<JobOptions>(seed);
    options.max = {40, 24, 13};
    options.tiling = {4, 8, 128, banks};
    return Job(options);
  }
  static LaunchPlan launch(std::uint64_t inputs, std::mt19937_64& random) {
    LaunchPlan launch;
    launch.m = static_cast<std::uint32_t>(1 + random() % 40);
    launch.mode = random_mode(random);
    launch.mixed_modes = random() % 3 == 0;
    launch.into_c = random() % 2 == 0;
    launch.inputs = inputs;
    return launch;
  }
};
struct AgGemmCase {
  using Job = AgGemmJob;
  static Job job(std::uint32_t banks, std::uint64_t seed) {
    auto options = options_of<AgGemmJobOptions>(seed);
    options.max = {40, 24, 13};
    options.tiling = {4, 8, 64, banks};
    return Job(options);
  }
  static AgGemmLaunchPlan launch(std::uint64_t inputs, std::mt19937_64& random) {
    return {static_cast<std::uint32_t>(1 + random() % 40), random_mode(random), random() % 2 == 0,
            false, inputs};
  }
};
struct MoeCase {
  using Job = MoeJob;
  static Job job(std::uint32_t banks, std::uint64_t seed) {
    auto options = options_of<MoeJobOptions>(seed);
    options.shape = {20, 24, 16, 6, 2, 160};
    options.tiling = {8, 8, 128, banks};
    return Job(options);
  }
  static MoeLaunch launch(std::uint64_t inputs, std::mt19937_64& random) {
    return {kSkews[random() % std::size(kSkews)], random() % 4 != 0, random_mode(random), inputs};
  }
};
struct CombineCase {
  using Job = CombineJob;
  static Job job(std::uint32_t banks, std::uint64_t seed) {
    auto options = options_of<CombineJobOptions>(seed);
    options.shape = {20, 24, 16, 6, 2, CombinePartials::kElement};
    options.tiling = {8, 8, 128, banks};
    return Job(options);
  }
  static CombineLaunchCase launch(std::uint64_t inputs, std::mt19937_64& random) {
    return {kSkews[random() % std::size(kSkews)], random() % 4 != 0, random_mode(random), inputs,
            random() % 2 == 0};
  }
};
template <bool kCausal>
struct RingCase {
  using Job = RingJob;
  static constexpr std::uint32_t kSeqMax = 60;
  static Job job(std::uint32_t banks, std::uint64_t seed) {
    auto options = options_of<RingJobOptions>(seed);
    options.shape = {kSeqMax, 2, 1, 64, kCausal};
    options.tiling = {5, 7, 700, 2, banks};
    return Job(options);
  }
  static RingLaunch launch(std::uint64_t inputs, std::mt19937_64& random) {
    constexpr std::uint32_t kLeast = kCausal ? 8 : 4;
    RingLaunch launch;
    launch.seq = static_cast<std::uint32_t>(kLeast + random() % (kSeqMax - kLeast + 1));
    launch.mode = random_mode(random);
    launch.lse = random() % 2 == 0;
    launch.draw = inputs;
    return launch;
  }
};

template <class Case>
class LateThreads : public ::testing::Test {};
using Cases = ::testing::Types<AgGemmCase, GemmSumCase<GemmRsOp>, GemmSumCase<GemmArOp>, MoeCase,
                               CombineCase, RingCase<false>, RingCase<true>>;
TYPED_TEST_SUITE(LateThreads, Cases);

TYPED_TEST(LateThreads, GetTheSameInLaunchesBackToBack) {
  constexpr std::uint32_t kLaunchesLeast = 200;
  constexpr std::uint32_t kStopsLeast = 200;
  constexpr std::uint32_t kLongStopsLeast = 1;
  for (std::uint32_t banks : {1u, 2u}) {
    SCOPED_TRACE(::testing::Message() << banks << " banks");
    const std::uint64_t seed = 100 + banks;
    std::mt19937_64 random(seed);
    auto job = TypeParam::job(banks, seed);
    NetworkThread network(job.cluster(), seed);
    RandomStops stops(seed);
    std::uint32_t done = 0;
    while (done < kLaunchesLeast || stops.stops() < kStopsLeast ||
           stops.long_stops() < kLongStopsLeast) {
      std::vector<decltype(TypeParam::launch(0, random))> launches;
      for (std::uint32_t i = 0; i < kLaunchesLeast / 4; ++i)
        launches.push_back(TypeParam::launch(done + i, random));
      const auto results = job.run(launches, std::chrono::milliseconds(1));
      for (std::size_t i = 0; i < launches.size(); ++i)
        ASSERT_EQ(job.check(launches[i], results[i]), "") << "launch " << done + i + 1;
      done += static_cast<std::uint32_t>(launches.size());
    }
    EXPECT_EQ(network.stop().complaint(), "");
  }
}

}  // namespace
}  // namespace mk::kernels::testing
