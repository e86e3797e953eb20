/// \file
/// What goes wrong in a launch of a product summed over ranks ends it, soon, with an error that
/// names who and what; and the operator stays broken. `GemmSumFailure`, of an operator's struct
/// (gemm_sum_job.h).
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "tests/kernels/support/failures.h"
#include "tests/kernels/support/gemm_sum_job.h"
#include "tests/kernels/support/network.h"

namespace mk::kernels::testing {

inline JobOptions job_options(std::uint32_t nodes, std::uint32_t locals, milliseconds timeout,
                              bool adaptive = false) {
  JobOptions options;
  options.cpu.adaptive = adaptive;
  options.nodes = nodes;
  options.locals = locals;
  options.max = {40, 48, 16};
  options.tiling = {8, 16, 600, 0};
  options.cpu.wait_timeout = timeout;
  return options;
}

template <class Op>
class GemmSumFailure : public ::testing::Test {};
TYPED_TEST_SUITE_P(GemmSumFailure);

TYPED_TEST_P(GemmSumFailure, AMissingRankIsNamed) {
  for (const bool adaptive : {false, true}) {
    GemmSumJob<TypeParam> job(job_options(2, 2, kWaitForMissing, adaptive));
    NetworkThread network(job.cluster(), 1);
    const auto errors = launch_on(job, {0, 1, 2}, {40, 40, 40, 40});
    EXPECT_EQ(errors[2].code, ErrorCode::kTimeout);
    EXPECT_TRUE(contains(errors[2].message,
                         "for rank 3: flag launch-record[local rank 1] shows 0, expected epoch 1"))
        << errors[2].message;
    // Node 0 hears of it only through its rails: one of its ranks reports, and the other that it
    // did.
    for (std::uint32_t rank : {0u, 1u}) {
      const std::string& text = errors[rank].message;
      const std::string own =
          rank == 0 ? "for rank 2: flag arrival[node 1]" : "for rank 3: flag arrival[node 1]";
      const std::string other = rank == 0 ? "the launch of rank 1 on the same node failed"
                                          : "the launch of rank 0 on the same node failed";
      EXPECT_TRUE(contains(text, own) || contains(text, other)) << text;
    }
  }
}

TYPED_TEST_P(GemmSumFailure, AfterAFailureTheOperatorStaysBroken) {
  GemmSumJob<TypeParam> job(job_options(1, 2, milliseconds(200)));
  const auto first = launch_on(job, {0}, {40, 40});
  EXPECT_EQ(first[0].code, ErrorCode::kTimeout);
  const auto second = launch_on(job, {0}, {40, 40});
  EXPECT_EQ(second[0], first[0]);
  // The other rank of the node, which comes late, learns that it need not wait: in its next launch
  // where it had all it needs from the first rank's.
  auto late = launch_on(job, {1}, {40, 40});
  if (late[1].code == ErrorCode::kOk) late = launch_on(job, {1}, {40, 40});
  EXPECT_EQ(late[1].code, ErrorCode::kAborted);
  EXPECT_TRUE(contains(late[1].message, "the launch of rank 0 on the same node failed"))
      << late[1].message;
}

TYPED_TEST_P(GemmSumFailure, AbortWordsEndALaunchLongBeforeItsDeadline) {
  GemmSumJob<TypeParam> job(job_options(2, 2, std::chrono::hours(1)));
  NetworkThread network(job.cluster(), 2);
  const auto errors = launch_and_abort(job.cluster(), 1, [&] {
    return launch_on(job, {0, 1, 2}, {40, 40, 40, 40});
  });
  for (std::uint32_t rank = 0; rank < 3; ++rank) EXPECT_EQ(errors[rank].code, ErrorCode::kAborted);
  EXPECT_TRUE(contains(errors[0].message, "session was aborted") ||
              contains(errors[0].message, "rank 1"))
      << errors[0].message;
  EXPECT_TRUE(contains(errors[2].message, "connection to the daemon was lost"))
      << errors[2].message;
}

TYPED_TEST_P(GemmSumFailure, LocalRanksWithDifferentMAreBothNamed) {
  for (const bool adaptive : {false, true}) {
    GemmSumJob<TypeParam> job(job_options(1, 3, std::chrono::seconds(120), adaptive));
    const auto errors = launch_on(job, {0, 1, 2}, {40, 39, 40});
    EXPECT_EQ(errors[1].code, ErrorCode::kShapeMismatch);
    EXPECT_TRUE(contains(errors[1].message, "this rank launched with m = 39, rank 0 with m = 40"))
        << errors[1].message;
    // The others see the mismatch themselves, or that another saw it first.
    for (std::uint32_t rank : {0u, 2u}) {
      EXPECT_TRUE(contains(errors[rank].message, "launched with m = 40, rank 1 with m = 39") ||
                  contains(errors[rank].message, "on the same node failed"))
          << errors[rank].message;
    }
  }
}

TYPED_TEST_P(GemmSumFailure, NodesWithDifferentMAreBothNamed) {
  GemmSumJob<TypeParam> job(job_options(2, 1, milliseconds(2000)));
  NetworkThread network(job.cluster(), 3);
  const auto errors = launch_on(job, {0, 1}, {17, 40});
  // Each finds out from the other's first chunk, unless it has failed before sending its own.
  expect_different_m_named(errors, 17, 40);
  for (const Error& error : errors) {
    EXPECT_TRUE(error.code == ErrorCode::kShapeMismatch || error.code == ErrorCode::kTimeout)
        << error.message;
  }
}

TYPED_TEST_P(GemmSumFailure, AFullRingNamesTheDaemon) {
  JobOptions options = job_options(2, 1, milliseconds(2000));
  options.slot_count_log2 = 2;
  options.tiling.chunk_bytes = 1;
  GemmSumJob<TypeParam> job(options);  // no network: nobody takes commands
  const auto errors = launch_on(job, {0, 1}, {40, 40});
  expect_daemon_named(errors);
  for (const Error& error : errors)
    EXPECT_TRUE(contains(error.message, "send block 0 waited")) << error.message;
}

TYPED_TEST_P(GemmSumFailure, WrongArgumentsChangeNothing) {
  GemmSumJob<TypeParam> job(job_options(1, 1, std::chrono::seconds(120)));
  std::vector<std::uint16_t> some(10000, 0);
  const auto refused = [&](const void* a, std::uint64_t lda, const void* b, std::uint64_t ldb,
                           std::uint64_t ldc, std::uint32_t m, std::string_view part) {
    expect_refused(job.op(0).launch(a, lda, b, ldb, some.data(), ldc, m), part);
  };
  const auto* x = some.data();
  refused(x, 16, x, 48, 48, 0, "m = 0 is not in 1 to 40");
  refused(x, 16, x, 48, 48, 41, "m = 41 is not in 1 to 40");
  refused(nullptr, 16, x, 48, 48, 4, "a is null");
  refused(x, 16, nullptr, 48, 48, 4, "b is null");
  refused(x, 15, x, 48, 48, 4, "at least 16, 48, 48");
  refused(x, 16, x, 47, 48, 4, "at least 16, 48, 48");
  refused(x, 16, x, 48, 47, 4, "at least 16, 48, 48");
  EXPECT_EQ(job.op(0).epoch(), 0u);
  EXPECT_EQ(launch_on(job, {0}, {40})[0].code, ErrorCode::kOk);
}

TYPED_TEST_P(GemmSumFailure, AContextThatDoesNotFitIsRefused) {
  GemmSumJob<TypeParam> job(job_options(2, 2, std::chrono::seconds(120)));
  const auto refused = [&](const RankContext& context, const GemmCpuOptions& options,
                           std::uint32_t k, std::string_view part) {
    expect_refused(TypeParam::Cpu::create(job.plan(), k, context, options), part);
  };
  const RankContext good = job.cluster().context(1);
  RankContext bad = good;
  bad.world.locals = 1;
  refused(bad, {}, 16, "the plan is for 2 nodes x 2 local ranks, the context for 2 x 1");
  bad = good;
  bad.world.node = 2;
  refused(bad, {}, 16, "node 2, local rank 1");
  bad = good;
  bad.workspaces[0] = nullptr;
  refused(bad, {}, 16, "workspace of local rank 0");
  bad = good;
  bad.flag_count -= 1;
  refused(bad, {}, 16, "arrival flags");
  bad = good;
  bad.flag_base += 1;
  refused(bad, {}, 16, "from a multiple of 64 on");
  bad = good;
  RailPeer peers[2] = {good.rail_peers[0], good.rail_peers[1]};
  peers[1].rank = 2;
  bad.rail_peers = peers;
  refused(bad, {}, 16, "rail peer on node 1 is rank 3, the context says 2");
  bad.rail_peers = nullptr;
  refused(bad, {}, 16, "names no rail peers");
  GemmCpuOptions options;
  options.blocks.send = 2;
  refused(good, options, 16, "2 send blocks need as many lanes; the context has 1");
  options = {};
  options.blocks.compute = 0;
  refused(good, options, 16, "0 blocks of one role");
  options = {};
  options.wait_timeout = milliseconds(0);
  refused(good, options, 16, "more than zero");
  refused(good, {}, 0, "k = 0");
}

REGISTER_TYPED_TEST_SUITE_P(GemmSumFailure, AMissingRankIsNamed,
                            AfterAFailureTheOperatorStaysBroken,
                            AbortWordsEndALaunchLongBeforeItsDeadline,
                            LocalRanksWithDifferentMAreBothNamed, NodesWithDifferentMAreBothNamed,
                            AFullRingNamesTheDaemon, WrongArgumentsChangeNothing,
                            AContextThatDoesNotFitIsRefused);

}  // namespace mk::kernels::testing
