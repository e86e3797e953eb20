// GEMM+AllReduce when something goes wrong; the tests are support/gemm_sum_failure_tests.h.
#include "tests/kernels/support/gemm_sum_failure_tests.h"

namespace mk::kernels::testing {
namespace {

INSTANTIATE_TYPED_TEST_SUITE_P(AllReduce, GemmSumFailure, GemmArOp);
// These have two nodes at most, so the form is the same; its own cases are below.
INSTANTIATE_TYPED_TEST_SUITE_P(TwoShotAllReduce, GemmSumFailure, GemmArTwoShotOp);

// Each node waits for the missing one's sums itself, before it waits for what others would make of
// them. So do workers that wait for what another worker of their rank makes.
TEST(TwoShotFailure, AMissingNodeIsNamedByAllOthers) {
  for (const std::uint32_t missing : {0u, 2u, 3u}) {
    for (const std::uint32_t receivers : {1u, 3u}) {
      SCOPED_TRACE(fmt::format("{} receive workers", receivers));
      JobOptions options = job_options(4, 1, kWaitForMissing);
      options.cpu.blocks.receive = receivers;
      GemmSumJob<GemmArTwoShotOp> job(options);
      NetworkThread network(job.cluster(), 1);
      std::vector<std::uint32_t> ranks;
      for (std::uint32_t rank = 0; rank < 4; ++rank)
        if (rank != missing) ranks.push_back(rank);
      const auto errors = launch_on(job, ranks, {40, 40, 40, 40});
      const std::string named = fmt::format("for rank {}: flag arrival[node {}", missing, missing);
      for (const std::uint32_t rank : ranks) {
        EXPECT_EQ(errors[rank].code, ErrorCode::kTimeout);
        EXPECT_TRUE(contains(errors[rank].message, named)) << errors[rank].message;
      }
    }
  }
}

// With fewer tiles than nodes the last nodes add up nothing: they hear of each other by headers.
TEST(TwoShotFailure, AMissingNodeWithoutAChunkIsNamed) {
  JobOptions options = job_options(5, 1, kWaitForMissing);
  options.max = {8, 16, 16};  // one tile, which node 0 finishes
  GemmSumJob<GemmArTwoShotOp> job(options);
  NetworkThread network(job.cluster(), 1);
  const auto errors = launch_on(job, {0, 1, 2, 3}, {8, 8, 8, 8, 8});
  for (std::uint32_t rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(errors[rank].code, ErrorCode::kTimeout);
    EXPECT_TRUE(contains(errors[rank].message, "for rank 4: flag arrival[node 4"))
        << errors[rank].message;
  }
}

TEST(TwoShotFailure, NodesWithDifferentMAreNamedAlsoWithoutAChunk) {
  JobOptions options = job_options(5, 1, kWaitForMissing);
  options.max = {16, 16, 16};
  GemmSumJob<GemmArTwoShotOp> job(options);
  NetworkThread network(job.cluster(), 1);
  const auto errors = launch_on(job, {0, 1, 2, 3, 4}, {8, 8, 8, 8, 7});
  std::uint32_t mismatches = 0;
  for (const Error& error : errors) {
    EXPECT_TRUE(error.code == ErrorCode::kShapeMismatch || error.code == ErrorCode::kTimeout)
        << error.message;
    mismatches += error.code == ErrorCode::kShapeMismatch;
  }
  EXPECT_GE(mismatches, 1u);
}

// A missing local rank: its node names it directly, the other nodes by the rail.
TEST(TwoShotFailure, AMissingLocalRankIsNamed) {
  GemmSumJob<GemmArTwoShotOp> job(job_options(3, 2, kWaitForMissing));
  NetworkThread network(job.cluster(), 1);
  const auto errors = launch_on(job, {0, 1, 2, 3, 4}, std::vector<std::uint32_t>(6, 40));
  EXPECT_TRUE(contains(errors[4].message, "for rank 5: flag launch-record[local rank 1]"))
      << errors[4].message;
  for (std::uint32_t rank = 0; rank < 4; ++rank) {
    EXPECT_TRUE(contains(errors[rank].message, "flag arrival[node 2") ||
                contains(errors[rank].message, "on the same node failed"))
        << errors[rank].message;
  }
}

}  // namespace
}  // namespace mk::kernels::testing
