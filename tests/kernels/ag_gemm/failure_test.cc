// What goes wrong in a launch of AllGather+GEMM ends it, soon, with an error that names who and
// what; and the operator stays broken.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "kernels/ops/ag_gemm/cpu.h"
#include "tests/kernels/ag_gemm/job.h"
#include "tests/kernels/support/failures.h"
#include "tests/kernels/support/network.h"

namespace mk::kernels::testing {
namespace {

AgGemmJobOptions job_options(std::uint32_t nodes, std::uint32_t locals, milliseconds timeout) {
  AgGemmJobOptions options;
  options.nodes = nodes;
  options.locals = locals;
  options.max = {40, 48, 16};
  options.tiling = {8, 16, 64, 0};
  options.cpu.wait_timeout = timeout;
  return options;
}

/// Says itself that rank `missing` is behind, or that a rank of its node did.
bool blames(const Error& error, std::uint32_t missing) {
  return (error.code == ErrorCode::kTimeout &&
          contains(error.message, fmt::format("for rank {}: flag", missing))) ||
         (error.code == ErrorCode::kAborted && contains(error.message, "on the same node failed"));
}

TEST(AgGemmFailure, AMissingRankIsNamedByEveryNode) {
  for (const auto& [nodes, locals, missing] :
       std::vector<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>>{
           {1, 3, 1}, {2, 2, 3}, {3, 1, 1}, {3, 2, 2}}) {
    AgGemmJob job(job_options(nodes, locals, kWaitForMissing));
    NetworkThread network(job.cluster(), 1);
    std::vector<std::uint32_t> ranks;
    for (std::uint32_t rank = 0; rank < job.size(); ++rank) {
      if (rank != missing) ranks.push_back(rank);
    }
    const auto errors = launch_on(job, ranks, std::vector<std::uint32_t>(job.size(), 40));
    std::vector<int> named(nodes, 0);
    for (std::uint32_t rank : ranks) {
      EXPECT_TRUE(blames(errors[rank], missing))
          << nodes << "x" << locals << ", rank " << rank << ": " << errors[rank].message;
      named[rank / locals] += errors[rank].code == ErrorCode::kTimeout;
    }
    for (std::uint32_t node = 0; node < nodes; ++node) {
      if (locals > 1 || node != missing / locals) {
        EXPECT_GE(named[node], 1) << nodes << "x" << locals << ", node " << node;
      }
    }
  }
}

TEST(AgGemmFailure, AfterAFailureTheOperatorStaysBroken) {
  AgGemmJob job(job_options(1, 2, milliseconds(200)));
  const auto first = launch_on(job, {0}, {40, 40});
  EXPECT_EQ(first[0].code, ErrorCode::kTimeout);
  EXPECT_TRUE(contains(first[0].message,
                       "for rank 1: flag rows-ready[rank 1][chunk 0] shows 0, expected epoch 1"))
      << first[0].message;
  const auto second = launch_on(job, {0}, {40, 40});
  EXPECT_EQ(second[0], first[0]);
  // The other rank of the node, which comes late, learns that it need not wait.
  const auto late = launch_on(job, {1}, {40, 40});
  // (or has all it needs from the first one)
  EXPECT_TRUE(late[1].code == ErrorCode::kAborted || late[1].code == ErrorCode::kOk)
      << late[1].message;
}

TEST(AgGemmFailure, AbortWordsEndALaunchLongBeforeItsDeadline) {
  AgGemmJob job(job_options(2, 2, std::chrono::hours(1)));
  NetworkThread network(job.cluster(), 2);
  const auto errors = launch_and_abort(job.cluster(), 1, [&] {
    return launch_on(job, {0, 1, 2}, {40, 40, 40, 40});
  });
  for (std::uint32_t rank = 0; rank < 3; ++rank)
    EXPECT_EQ(errors[rank].code, ErrorCode::kAborted) << errors[rank].message;
  EXPECT_TRUE(contains(errors[2].message, "connection to the daemon was lost"))
      << errors[2].message;
}

TEST(AgGemmFailure, LocalRanksWithDifferentMAreBothNamed) {
  AgGemmJob job(job_options(1, 3, std::chrono::seconds(120)));
  const auto errors = launch_on(job, {0, 1, 2}, {40, 39, 40});
  int named = 0;
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    const std::string& text = errors[rank].message;
    const bool both =
        rank == 1 ? contains(text, "launched with m = 39, rank") && contains(text, "with m = 40")
                  : contains(text, "launched with m = 40, rank 1 with m = 39");
    EXPECT_TRUE(both || contains(text, "on the same node failed")) << text;
    named += both && errors[rank].code == ErrorCode::kShapeMismatch;
  }
  EXPECT_GE(named, 1);
}

// Also when the other's shard is empty, so that no tile needs it.
TEST(AgGemmFailure, NodesWithDifferentMAreBothNamed) {
  for (std::uint32_t m : {17u, 1u}) {
    AgGemmJob job(job_options(2, 1, milliseconds(2000)));
    NetworkThread network(job.cluster(), 3);
    const auto errors = launch_on(job, {0, 1}, {m, 40});
    expect_different_m_named(errors, m, 40);
    for (const Error& error : errors) {
      EXPECT_TRUE(error.code == ErrorCode::kShapeMismatch || error.code == ErrorCode::kTimeout)
          << error.message;
    }
  }
}

TEST(AgGemmFailure, AFullRingNamesTheDaemon) {
  AgGemmJobOptions options = job_options(2, 1, milliseconds(1000));
  options.slot_count_log2 = 2;
  AgGemmJob job(options);  // no network: nobody takes commands
  expect_daemon_named(launch_on(job, {0, 1}, {40, 40}));
}

TEST(AgGemmFailure, WrongArgumentsChangeNothing) {
  AgGemmJob job(job_options(1, 1, std::chrono::seconds(120)));
  std::vector<std::uint16_t> some(10000, 0);
  const auto refused = [&](const void* a, std::uint64_t lda, const void* b, std::uint64_t ldb,
                           void* c, std::uint64_t ldc, std::uint32_t m, std::string_view part) {
    expect_refused(job.op(0).launch(a, lda, b, ldb, c, ldc, m), part);
  };
  auto* x = some.data();
  refused(x, 16, x, 48, x, 48, 0, "m = 0 is not in 1 to 40");
  refused(x, 16, x, 48, x, 48, 41, "m = 41 is not in 1 to 40");
  refused(nullptr, 16, x, 48, x, 48, 4, "a is null, but of 4 rows rank 0 brings 4");
  refused(x, 16, nullptr, 48, x, 48, 4, "b is null");
  refused(x, 16, x, 48, nullptr, 48, 4, "c is null");
  refused(x, 15, x, 48, x, 48, 4, "at least 16, 48, 48");
  refused(x, 16, x, 47, x, 48, 4, "at least 16, 48, 48");
  refused(x, 16, x, 48, x, 47, 4, "at least 16, 48, 48");
  EXPECT_EQ(job.op(0).epoch(), 0u);
  EXPECT_EQ(launch_on(job, {0}, {40})[0].code, ErrorCode::kOk);
}

TEST(AgGemmFailure, AShardInTheWorkspaceButNotWhereInputSaysIsRefused) {
  AgGemmJob job(job_options(1, 2, std::chrono::seconds(120)));
  std::vector<std::uint16_t> some(10000, 0);
  auto* const x = some.data();
  auto* const input = static_cast<std::uint16_t*>(job.op(0).input());
  ASSERT_NE(input, nullptr);
  const auto refused = [&](const std::uint16_t* a, std::uint64_t lda) {
    expect_refused(job.op(0).launch(a, lda, x, 48, x + 3000, 48, 40),
                   "only begin at input(), with rows of 16");
  };
  refused(input + 16, 16);
  refused(input - 32, 16);
  refused(input, 17);
  // One rank alone reads its rows where they lie: there is no such place.
  EXPECT_EQ(AgGemmJob(job_options(1, 1, std::chrono::seconds(120))).op(0).input(), nullptr);
}

TEST(AgGemmFailure, AContextThatDoesNotFitIsRefused) {
  AgGemmJob job(job_options(2, 2, std::chrono::seconds(120)));
  const auto refused = [&](const RankContext& context, const GemmCpuOptions& options,
                           std::string_view part) {
    expect_refused(AgGemmCpu::create(job.op(1).plan(), context, options), part);
  };
  const RankContext good = job.cluster().context(1);
  RankContext bad = good;
  bad.world.locals = 1;
  refused(bad, {}, "the plan is for 2 nodes x 2 local ranks, the context for 2 x 1");
  bad = good;
  bad.flag_count -= 1;
  refused(bad, {}, "arrival flags");
  GemmCpuOptions options;
  options.blocks.send = 2;
  refused(good, options, "2 send blocks need as many lanes; the context has 1");
  options = {};
  options.blocks.share = 0;
  refused(good, options, "0 blocks of one role");
}

}  // namespace
}  // namespace mk::kernels::testing
