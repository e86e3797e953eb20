// AllGather+GEMM on the CPU executor, ranks as threads of one process: right results for every
// world, whatever the skew.
#include "kernels/ops/ag_gemm/cpu.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <random>
#include <thread>
#include <tuple>
#include <vector>

#include "kernels/cpu/pacer.h"
#include "kernels/ops/ag_gemm/schedule.h"
#include "kernels/plan/account.h"
#include "tests/kernels/ag_gemm/job.h"
#include "tests/kernels/support/every_world.h"
#include "tests/kernels/support/network.h"
#include "tests/kernels/support/same_bits.h"

namespace mk::kernels::testing {
namespace {

std::vector<AgGemmLaunchPlan> random_launches(std::uint32_t count, std::uint32_t m_max,
                                              std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<AgGemmLaunchPlan> launches;
  for (std::uint32_t i = 0; i < count; ++i) {
    AgGemmLaunchPlan launch;
    launch.m = i == 0 ? m_max : static_cast<std::uint32_t>(1 + random() % m_max);
    launch.mode = random() % 3 == 0 ? Mode::kUnfused : Mode::kFused;
    launch.gathered = random() % 2 == 0;
    launch.padded = random() % 2 == 0;
    launch.inputs = i;
    launch.in_place = random() % 3 != 0;
    launches.push_back(launch);
  }
  return launches;
}

TEST_P(EveryWorld, GivesEveryRankItsProductForChangingM) {
  const auto [nodes, locals] = GetParam();
  const std::uint64_t seed = this->seed();
  std::mt19937_64 random(seed);
  AgGemmJobOptions options;
  options.nodes = nodes;
  options.locals = locals;
  options.max = {61, 20 + static_cast<std::uint32_t>(random() % 40), 19};
  options.dtype = (nodes + locals) % 2 == 0 ? DType::kBf16 : DType::kF16;
  options.tiling = {8, 16, 64, nodes == 3 ? 1u : 0u};  // rows straddle chunks
  const auto blocks = [&] { return static_cast<std::uint32_t>(1 + random() % 2); };
  options.cpu.blocks = {blocks(), 1, blocks(), blocks(), blocks(), 1, 1};
  options.cpu.wait_timeout = std::chrono::seconds(120);
  options.cpu.b_layout = random() % 2 == 0 ? BLayout::kKN : BLayout::kNK;
  options.cpu.adaptive = random() % 2 == 0;
  options.seed = seed;
  options.slot_count_log2 = 4;  // the smallest ring: credits run out
  AgGemmJob job(options);
  NetworkThread network(job.cluster(), seed);

  const auto launches = random_launches(12, options.max.m, seed);
  const auto results = job.run(launches, std::chrono::microseconds(3000));
  expect_right_launches(job, network, launches, results,
                        [&](std::size_t i, std::uint32_t rank, const LaunchStats& stats) {
                          const World& world = job.cluster().rank(rank).world;
                          const AgGemmSchedule schedule(job.op(rank).plan(), world, launches[i].m);
                          EXPECT_EQ(stats.m, launches[i].m);
                          EXPECT_EQ(stats.network_bytes, schedule.network_bytes());
                          EXPECT_EQ(stats.commands, schedule.commands());
                        });
  // A bound far above what is seen would prove little.
  EXPECT_GT(job.worst(), 0.1);
}

INSTANTIATE_TEST_SUITE_P(Worlds, EveryWorld,
                         ::testing::Combine(::testing::Values(1u, 2u, 3u, 4u),
                                            ::testing::Values(1u, 2u, 3u, 4u, 8u)),
                         name_of_world);

AgGemmJobOptions two_by_two() {
  AgGemmJobOptions options;
  options.nodes = 2;
  options.locals = 2;
  options.max = {40, 48, 16};
  options.tiling = {8, 16, 64, 0};
  options.cpu.wait_timeout = std::chrono::seconds(120);
  return options;
}

TEST(AgGemmCpu, EveryEpilogueIsAppliedToEachTile) {
  std::uint64_t seed = 0;
  for (const auto& [nodes, locals] : {std::pair{1u, 1u}, {1u, 3u}, {2u, 2u}}) {
    for (std::uint32_t i = 1; i < 10; ++i) {
      AgGemmJobOptions options = two_by_two();
      options.nodes = nodes;
      options.locals = locals;
      options.max = {23, 36, 17};
      options.dtype = ++seed % 2 == 0 ? DType::kBf16 : DType::kF16;
      options.epilogue = {static_cast<Activation>(i % 5), i >= 5};
      options.seed = seed;
      AgGemmJob job(options);
      NetworkThread network(job.cluster(), seed);
      const auto launches = random_launches(2, options.max.m, seed);
      const auto results = job.run(launches);
      for (std::size_t launch = 0; launch < launches.size(); ++launch) {
        ASSERT_EQ(job.check(launches[launch], results[launch]), "")
            << nodes << " x " << locals << ", " << name_of(options.epilogue.activation);
      }
    }
  }
}

TEST(AgGemmCpu, RepeatedRunsGiveTheSameBits) {
  AgGemmJobOptions options = two_by_two();
  options.max.k = 700;
  options.cpu.blocks.compute = 2;
  AgGemmJob job(options);
  AgGemmLaunchPlan launch;
  launch.m = 37;
  expect_same_bits_each_time(job, launch, 8, &AgGemmResult::c);
}

TEST(AgGemmCpu, AnAdaptivePartitionChangesNoBit) {
  for (const auto& [nodes, locals] : {std::pair{1u, 2u}, {1u, 4u}, {2u, 1u}, {2u, 2u}}) {
    AgGemmJobOptions options = two_by_two();
    options.nodes = nodes;
    options.locals = locals;
    options.max = {160, 96, 200};
    expect_same_bits_in_any_partition<AgGemmJob>(
        options, &RoleBlocks::share, random_launches(5, options.max.m, nodes * 10 + locals),
        [](const auto&...) {});
    if (HasFatalFailure()) return;
  }
}

// With one bank a node's rows are overwritten as soon as it says that it has read them. Threads
// that began by sharing read them, too.
TEST(AgGemmCpu, AnAdaptiveLaunchReleasesItsBankAfterItsLastTile) {
  AgGemmJobOptions options = two_by_two();
  options.nodes = 3;
  options.locals = 1;
  options.max = {61, 48, 400};
  options.tiling = {8, 16, 64, 1};
  options.cpu.blocks.share = 4;
  options.cpu.adaptive = true;
  AgGemmJob job(options);
  NetworkThread network(job.cluster(), 6);
  std::vector<AgGemmLaunchPlan> launches = random_launches(150, options.max.m, 6);
  for (AgGemmLaunchPlan& launch : launches) launch.mode = Mode::kFused;
  const auto results = job.run(launches);
  for (std::size_t i = 0; i < launches.size(); ++i)
    ASSERT_EQ(job.check(launches[i], results[i]), "") << "launch " << i + 1;
  EXPECT_EQ(network.stop().complaint(), "");
}

// What rows in place are for: no copy of them is made for the network.
TEST(AgGemmCpu, RowsInPlaceAreNotCopied) {
  AgGemmJobOptions options = two_by_two();
  options.locals = 1;
  AgGemmJob job(options);
  NetworkThread network(job.cluster(), 7);
  // Of rank 0: where launches 1, 3, ... put rows that lie elsewhere.
  const GatherSchedule schedule(job.op(0).plan().gather, {2, 1, 0, 0});
  auto* const input = static_cast<std::byte*>(job.op(0).input());
  auto* const copy = reinterpret_cast<std::uint16_t*>(input + schedule.rows_at(1, 0) -
                                                      schedule.own_rows_in_place());
  const std::size_t count = std::size_t{20} * options.max.k;
  std::fill(copy, copy + count, std::uint16_t{0x7fff});
  const auto untouched = [&] { return std::count(copy, copy + count, std::uint16_t{0x7fff}); };
  const auto run = [&](bool in_place, std::uint32_t launches) {
    const std::vector<AgGemmLaunchPlan> plans(launches,
                                              {40, Mode::kFused, false, false, 0, in_place});
    for (const auto& results : job.run(plans)) ASSERT_EQ(job.check(plans[0], results), "");
  };
  run(true, 6);
  EXPECT_EQ(untouched(), static_cast<std::ptrdiff_t>(count));
  run(false, 1);
  EXPECT_EQ(untouched(), 0) << "that is where they go";
  EXPECT_EQ(network.stop().complaint(), "");
}

TEST(AgGemmCpu, ManyLaunchesBackToBackReadNoStaleFlag) {
  for (std::uint32_t banks : {1u, 2u}) {
    AgGemmJobOptions options = two_by_two();
    options.nodes = 3;
    options.max = {24, 24, 5};
    options.tiling = {4, 8, 64, banks};
    AgGemmJob job(options);
    NetworkThread network(job.cluster(), 6);
    const auto launches = random_launches(100, options.max.m, 6);
    const auto results = job.run(launches);
    for (std::size_t i = 0; i < launches.size(); ++i) {
      ASSERT_EQ(job.check(launches[i], results[i]), "")
          << "launch " << i + 1 << ", m = " << launches[i].m;
    }
    EXPECT_EQ(network.stop().complaint(), "");
  }
}

TEST(AgGemmCpu, ChosenTilesAndALongerK) {
  AgGemmJobOptions options;
  options.nodes = 2;
  options.max = {300, 264, 1500};
  options.cpu.wait_timeout = std::chrono::seconds(120);
  for (DType dtype : {DType::kBf16, DType::kF16}) {
    options.dtype = dtype;
    AgGemmJob job(options);
    NetworkThread network(job.cluster(), 7);
    const std::vector<AgGemmLaunchPlan> launches = {{300, Mode::kFused, true, false, 0},
                                                    {1, Mode::kFused, true, true, 1}};
    const auto results = job.run(launches);
    for (std::size_t i = 0; i < launches.size(); ++i)
      ASSERT_EQ(job.check(launches[i], results[i]), "");
  }
}

TEST(AgGemmCpu, OneRankIsAPlainProductAndCopiesNothing) {
  AgGemmJobOptions options;
  options.max = {50, 33, 64};
  AgGemmJob job(options);
  EXPECT_LE(job.op(0).plan().workspace_bytes, 4096u) << "no slots";
  const auto launches = random_launches(5, 50, 8);
  const auto results = job.run(launches);
  for (std::size_t i = 0; i < launches.size(); ++i) {
    ASSERT_EQ(job.check(launches[i], results[i]), "");
    EXPECT_EQ(results[i][0].stats->commands, 0u);
    EXPECT_EQ(results[i][0].stats->role(Role::kShare).blocks, 0u);
  }
}

/// How many tiles rank 0 of two has computed before rank 1 comes, `late` after it.
std::uint32_t tiles_before_the_last(Mode mode, std::chrono::milliseconds late) {
  AgGemmJobOptions options;
  options.locals = 2;
  options.max = {64, 64, 64};
  options.cpu.wait_timeout = std::chrono::seconds(120);
  AgGemmJob job(options);
  job.op(0).runner().set_trace(1000);
  const AgGemmLaunchPlan plan{64, mode, false, false, 0};
  AgGemmResult first;
  std::thread early([&] { first = job.launch(0, plan); });
  std::this_thread::sleep_for(late);
  const std::uint64_t late_ns = CpuPacer::now_ns();
  const AgGemmResult second = job.launch(1, plan);
  early.join();
  EXPECT_EQ(job.check(plan, {first, second}), "");
  std::uint32_t before = 0;
  for (const TraceEvent& event : job.op(0).runner().trace())
    before += event.span.kind == SpanKind::kTile && event.span.end_ns < late_ns;
  return before;
}

// Fused launches compute before everything is here; unfused ones do not. On one node: the last rank
// comes late, and the first has by then computed its own tiles, or not.
TEST(AgGemmCpu, FusedLaunchesBeginBeforeTheLastRankDoes) {
  using std::chrono::milliseconds;
  EXPECT_EQ(tiles_before_the_last(Mode::kUnfused, milliseconds(200)), 0u);
  // How late is late enough is up to the machine.
  std::uint32_t before = 0;
  for (const milliseconds late : {milliseconds(200), milliseconds(2'000), milliseconds(20'000)}) {
    before = tiles_before_the_last(Mode::kFused, late);
    if (before > 0) break;
  }
  EXPECT_GT(before, 0u);
}

// The estimate chooses, each rank for itself, and the statistics say what ran.
TEST(AgGemmCpu, AutoRunsTheCheaperForm) {
  for (const auto& [step_ns, cheaper] : {std::pair{1.0, Mode::kFused}, {1e9, Mode::kUnfused}}) {
    AgGemmJobOptions options = two_by_two();
    options.cpu.rates = {1e9, 1e9, 1e9, 1, step_ns};
    AgGemmJob job(options);
    NetworkThread network(job.cluster(), 10);
    auto launches = random_launches(12, options.max.m, 10);
    for (AgGemmLaunchPlan& launch : launches) launch.mode = Mode::kAuto;
    const auto results = job.run(launches);
    for (std::size_t i = 0; i < launches.size(); ++i) {
      ASSERT_EQ(job.check(launches[i], results[i]), "");
      for (std::uint32_t rank = 0; rank < job.size(); ++rank) {
        const LaunchStats& stats = *results[i][rank].stats;
        const Estimate expected =
            plan::expected(job.op(rank).plan().work(job.cluster().rank(rank).world, launches[i].m),
                           options.cpu.rates);
        EXPECT_EQ(stats.estimate.fused_ns, expected.fused_ns);
        EXPECT_EQ(stats.estimate.unfused_ns, expected.unfused_ns);
        EXPECT_EQ(stats.mode, expected.cheaper());
      }
    }
    EXPECT_EQ(results[0][0].stats->mode, cheaper) << "the largest m";
  }
}

// The check itself must be able to fail.
TEST(AgGemmCpu, RowsThatDidNotMoveOrChangedPlacesAreSeen) {
  for (bool NetworkOptions::*fault :
       {&NetworkOptions::truncate_one_chunk, &NetworkOptions::swap_in_one_chunk}) {
    AgGemmJobOptions options = two_by_two();
    options.tiling.chunk_bytes = 256;
    AgGemmJob job(options);
    NetworkOptions faulty;
    faulty.*fault = true;
    NetworkThread network(job.cluster(), 9, faulty);
    const std::vector<AgGemmLaunchPlan> launches = {{40, Mode::kFused, false, false, 0}};
    EXPECT_THAT(job.check(launches[0], job.run(launches)[0]), ::testing::HasSubstr("element ["));
  }
}

}  // namespace
}  // namespace mk::kernels::testing
