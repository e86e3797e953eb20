// Tiles that a rank adds up itself as it computes them, one of them late
// (kernels/cuda/core/late_adds.cuh): in many turns, one launch after the other; beside a rank that
// sums by groups; and after a failed wait. Of two ranks of a node; others' sums are made by groups
// here, too. And a shard that is summed once, with what has come from other nodes.
#include <gtest/gtest.h>

#include <chrono>
#include <string>

#include "tests/gpu/operators_fixture.h"

namespace mk::test {
namespace {

using kernels::Mode;
using namespace std::chrono_literals;

/// Whole tiles of 128 x 256, so that GEMM+AR adds up its own, too. An even number of blocks: each
/// has only own tiles, or only others'; an odd one: interleaved.
TEST_P(Operators, OwnTilesInManyTurns) {
  if (!sums()) GTEST_SKIP() << "sums only";
  for (const std::uint32_t blocks : {2u, 3u, 5u}) {
    SCOPED_TRACE(std::to_string(blocks) + " compute blocks");
    JobSetup with = setup(1024, 1024, 136);
    with.k.back() = 1096;
    with.options.compute_blocks = blocks;
    launch_without_a_pause(with, 2, 30, {1024, 768, 512, 384, 256, 128, 64});
    if (HasFatalFailure()) return;
  }
}

TEST_P(Operators, RanksThatSumInDifferentWays) {
  if (!sums()) GTEST_SKIP() << "sums only";
  for (const std::uint32_t first : {0u, 3u}) {
    JobSetup with = setup(1024, 1024, 136);
    for (std::uint32_t r = 0; r < world(); ++r)
      with.stream_groups.push_back(r % 2 == 0 ? first : 3 - first);
    with.options.compute_blocks = 3;
    launch_without_a_pause(with, 2, 30, {1024, 768, 512, 384, 256, 128, 64});
    if (HasFatalFailure()) return;
  }
}

/// The sum within the node is rounded in registers then, instead of by being stored.
TEST_P(Operators, AShardSummedOnceHasTheBitsOfOneSummedTwice) {
  if (GetParam().op != Op::kGemmRs || GetParam().nodes == 1 || GetParam().locals == 1)
    GTEST_SKIP() << "GEMM+RS over several nodes of several ranks only";
  constexpr std::uint32_t kN = 1032;
  for (const std::uint32_t m : {600u, 2048u}) {
    SCOPED_TRACE("m " + std::to_string(m));
    JobSetup with = setup(m, kN, 264);
    with.options.sums_once = false;
    const std::uint64_t same = seed();
    std::vector<DeviceMemory> twice;
    {
      Job job(with);
      launch_and_keep(job, m, same, Mode::kFused, twice);
    }
    with.options.sums_once = true;
    Job job(with);
    for (int run = 0; run < 10 && !HasFatalFailure(); ++run) {
      launch_to_end(job, m, same, run % 5 == 4 ? Mode::kUnfused : Mode::kFused);
      if (!HasFatalFailure()) expect_same_bits(job, m, twice);
    }
    if (!HasFatalFailure()) judge(job, m);
  }
}

/// The rank that is missing may still be in its last launch, whose C its caller has yet to read.
TEST_P(Operators, AWaitInVainLeavesTheOtherRanksCAlone) {
  if (GetParam().op != Op::kGemmAr || world() == 1) GTEST_SKIP() << "GEMM+AR of several ranks only";
  JobSetup with = setup(512, 512, 128);
  with.options.wait_timeout = 200ms;
  with.in_workspace = true;
  Job job(with);
  check(job, 512, Mode::kFused);
  const std::uint32_t missing = job.world() - 1;
  job.poison(missing);
  const std::int64_t count = job.c_elements(missing, 512);
  const DeviceMemory untouched(static_cast<std::size_t>(count) * 2);
  poison(untouched.data(), count, job.stream(missing));
  require(cudaStreamSynchronize(job.stream(missing)), "poison");
  for (std::uint32_t r = 0; r < missing; ++r) ASSERT_TRUE(job.launch(r, 512));
  for (std::uint32_t r = 0; r < missing; ++r) ASSERT_FALSE(job.finish(r));
  job.make_current(missing);
  EXPECT_EQ(count_different(job.c(missing), untouched.data(), count, job.stream(missing)), 0);
}

}  // namespace
}  // namespace mk::test
