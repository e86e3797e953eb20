// An adaptive partition of the operators on GPUs (CudaOptions::adaptive): whatever it begins with
// and wherever it moves, results are right and have the same bits. Its gains are partition_bench's.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/gpu/graphs.h"
#include "tests/gpu/operators_fixture.h"

namespace mk::test {
namespace {

using kernels::Mode;

/// Enough for a search to end, and some more.
constexpr int kLaunches = 70;

TEST_P(Operators, APartitionAdaptsFromAnyBegin) {
  if (world() == 1) GTEST_SKIP() << "several ranks only";
  constexpr std::uint32_t kM = 1500;
  std::vector<DeviceMemory> planned;
  const std::uint64_t same = seed();
  JobSetup with = setup(kM, 1032, 520);
  with.options.compute_blocks = 0;
  {
    Job job(with);
    launch_and_keep(job, kM, same, Mode::kFused, planned);
    if (HasFatalFailure()) return;
  }
  for (const std::uint32_t streams : {0u, 1u, 24u}) {
    SCOPED_TRACE(std::to_string(streams) + " groups");
    JobSetup from = with;
    from.options.adaptive = true;
    from.options.stream_groups = streams;
    Job job(from);
    std::uint32_t moves = 0;
    for (int launch = 0; launch < kLaunches; ++launch) {
      launch_to_end(job, kM, same, launch % 16 == 15 ? Mode::kUnfused : Mode::kFused);
      if (HasFatalFailure()) return;
      if (launch % 4 == 3 || launch + 1 == kLaunches) expect_same_bits(job, kM, planned);
      if (HasFatalFailure()) return;
      const auto stats = job.op(0).finish(job.stream(0));
      ASSERT_TRUE(stats) << stats.error().message;
      EXPECT_GE(stats->partition.moves, moves);
      EXPECT_GE(stats->partition.last, 1u);
      moves = stats->partition.moves;
    }
    // It has at least tried neighbours.
    EXPECT_GE(moves, 2u);
    judge(job, kM);
  }
}

TEST_P(Operators, APartitionAdaptsInBatchesOfManyHeights) {
  if (world() == 1) GTEST_SKIP() << "several ranks only";
  JobSetup with = setup(1024, 1024, 136);
  with.options.adaptive = true;
  launch_without_a_pause(with, 6, 40, {1024, 768, 512, 1});
}

/// A captured launch keeps the partition that was the best one when it was captured.
TEST_P(Operators, AnAdaptivePartitionInAGraph) {
  if (world() == 1) GTEST_SKIP() << "several ranks only";
  constexpr std::uint32_t kM = 700;
  JobSetup with = setup(kM, 768, 192);
  with.options.adaptive = true;
  // Its DMA engines' copies and waits are in the graph, too.
  Job job(with);
  for (int launch = 0; launch < 6; ++launch) {
    check(job, kM, Mode::kFused);
    if (HasFatalFailure()) return;
  }
  Graphs graphs;
  const Status captured =
      graphs.capture_all(job, [&](std::uint32_t r) { return job.launch(r, kM); });
  ASSERT_TRUE(captured) << captured.error().message;
  for (int replay = 0; replay < 20 && !HasFatalFailure(); ++replay) {
    const std::uint64_t inputs = seed();
    for (std::uint32_t r = 0; r < job.world(); ++r) {
      job.fill(r, inputs);
      job.poison(r);
      require(cudaStreamSynchronize(job.stream(r)), "inputs");
    }
    graphs.replay_all(job);
    for (std::uint32_t r = 0; r < job.world(); ++r) {
      const Status finished = job.finish(r);
      ASSERT_TRUE(finished) << finished.error().message;
    }
    judge(job, kM);
    // Launches between replays go on with the search.
    if (replay % 4 == 3 && !HasFatalFailure()) check(job, kM, Mode::kFused);
  }
}

// As of a server that captures a graph for each size of a batch.
TEST_P(Operators, AHeightWhoseFirstLaunchIsCaptured) {
  if (world() == 1) GTEST_SKIP() << "several ranks only";
  constexpr std::uint32_t kLaunched = 700, kCaptured = 300;
  JobSetup with = setup(kLaunched, 768, 192);
  with.options.adaptive = true;
  Job job(with);
  check(job, kLaunched, Mode::kFused);
  if (HasFatalFailure()) return;
  Graphs graphs;
  const Status captured =
      graphs.capture_all(job, [&](std::uint32_t r) { return job.launch(r, kCaptured); });
  ASSERT_TRUE(captured) << captured.error().message;
  const std::uint64_t inputs = seed();
  for (std::uint32_t r = 0; r < job.world(); ++r) {
    job.fill(r, inputs);
    job.poison(r);
    require(cudaStreamSynchronize(job.stream(r)), "inputs");
  }
  graphs.replay_all(job);
  for (std::uint32_t r = 0; r < job.world(); ++r) {
    const Status finished = job.finish(r);
    ASSERT_TRUE(finished) << finished.error().message;
  }
  judge(job, kCaptured);
  // Past the first launches, which nobody measures.
  for (int launch = 0; launch < 14 && !HasFatalFailure(); ++launch)
    check(job, kCaptured, Mode::kFused);
}

}  // namespace
}  // namespace mk::test
