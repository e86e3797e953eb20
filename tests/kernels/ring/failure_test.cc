// What goes wrong in a launch ends it, soon, with an error that names who and what; and wrong
// arguments change nothing.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <thread>
#include <vector>

#include "kernels/gather/schedule.h"
#include "tests/kernels/ring/job.h"
#include "tests/kernels/support/network.h"

namespace mk::kernels::testing {
namespace {

using std::chrono::milliseconds;

RingJobOptions job_options(std::uint32_t nodes, std::uint32_t locals, milliseconds timeout) {
  RingJobOptions options;
  options.nodes = nodes;
  options.locals = locals;
  options.shape = {80, 2, 1, 64, true};
  options.tiling = {5, 7, 700, 2, 2};
  options.cpu.wait_timeout = timeout;
  return options;
}

std::vector<Error> launch_on(RingJob& job, const std::vector<std::uint32_t>& ranks,
                             const std::vector<std::uint32_t>& seq) {
  std::vector<Error> errors(job.size());
  std::vector<std::thread> threads;
  for (std::uint32_t rank : ranks) {
    threads.emplace_back([&, rank] {
      RingLaunch launch;
      launch.seq = seq[rank];
      const RingRankResult result = job.launch(rank, launch);
      errors[rank] = result.stats ? Error{ErrorCode::kOk, ""} : result.stats.error();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

bool contains(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

/// How long the message says that the rank waited.
double waited_s(const Error& error) {
  constexpr std::string_view kBefore = "waited ";
  const std::size_t at = error.message.find(kBefore);
  return at == std::string::npos ? 0 : std::stod(error.message.substr(at + kBefore.size()));
}

TEST(RingAttentionFailure, AMissingRankIsNamed) {
  for (const bool adaptive : {false, true}) {
    RingJobOptions options = job_options(1, 3, milliseconds(1000));
    options.cpu.adaptive = adaptive;
    if (adaptive) options.cpu.blocks.compute = 5;
    RingJob job(options);
    const auto errors = launch_on(job, {0, 1}, {80, 80, 80});
    for (std::uint32_t rank : {0u, 1u}) {
      EXPECT_TRUE(contains(errors[rank].message, "for rank 2: flag rows-ready") ||
                  contains(errors[rank].message, "on the same node failed"))
          << errors[rank].message;
    }
    EXPECT_TRUE(errors[0].code == ErrorCode::kTimeout || errors[1].code == ErrorCode::kTimeout);
  }
}

TEST(RingAttentionFailure, AMissingNodeIsNamed) {
  RingJob job(job_options(2, 1, milliseconds(1000)));
  NetworkThread network(job.cluster(), 1);
  const auto errors = launch_on(job, {0}, {80, 80});
  EXPECT_EQ(errors[0].code, ErrorCode::kTimeout);
  EXPECT_TRUE(contains(errors[0].message, "for rank 1: flag arrival[node 1][chunk 0]"))
      << errors[0].message;
}

// Where shards take turns, a rank sends no more of its own keys either while it waits for those of
// the missing rank. Only those who wait for that one itself may speak first.
TEST(RingAttentionFailure, AMissingNodeIsNamedWhereShardsTakeTurns) {
  RingJobOptions options = job_options(4, 1, milliseconds(1000));
  options.shape.causal = false;
  options.tiling.chunk_bytes = 128;
  options.tiling.packing = KeyPacking::kHeads;
  options.tiling.turn_chunks = 1;
  RingJob job(options);
  ASSERT_GT(job.plan().gather.chunks_max, 2 * ChunkOrder::kLastTurns);
  NetworkThread network(job.cluster(), 1);
  const auto errors = launch_on(job, {1, 2, 3}, {80, 80, 80, 80});
  EXPECT_GE(waited_s(errors[1]), 1.25) << errors[1].message;
  EXPECT_GE(waited_s(errors[2]), 1.5) << errors[2].message;
  for (const std::uint32_t rank : {1u, 2u}) {
    EXPECT_TRUE(contains(errors[rank].message, "for rank 0: flag arrival[node 0][chunk 0]"))
        << errors[rank].message;
  }
  // Its blocks wait for keys that rank 2 does not pass on.
  EXPECT_GE(waited_s(errors[3]), 2) << errors[3].message;
  EXPECT_TRUE(contains(errors[3].message, "why it, or a rank that it waits for, is behind"))
      << errors[3].message;
}

TEST(RingAttentionFailure, RanksWithAnotherSequenceAreBothNamed) {
  RingJob job(job_options(1, 2, std::chrono::seconds(60)));
  const auto errors = launch_on(job, {0, 1}, {80, 79});
  EXPECT_TRUE(contains(errors[0].message, "launched with m = 80, rank 1 with m = 79") ||
              contains(errors[1].message, "launched with m = 79, rank 0 with m = 80"))
      << errors[0].message << "\n"
      << errors[1].message;
  for (const Error& error : errors) {
    EXPECT_TRUE(error.code == ErrorCode::kShapeMismatch || error.code == ErrorCode::kAborted)
        << error.message;
  }
}

TEST(RingAttentionFailure, AbortWordsEndALaunchLongBeforeItsDeadline) {
  RingJob job(job_options(2, 2, std::chrono::hours(1)));
  NetworkThread network(job.cluster(), 2);
  std::thread aborter([&] {
    std::this_thread::sleep_for(milliseconds(50));
    for (std::uint32_t rank = 0; rank < 3; ++rank)
      shm::store_release(&job.cluster().rank(rank).session_abort, 1u);
  });
  const auto errors = launch_on(job, {0, 1, 2}, {80, 80, 80, 80});
  aborter.join();
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(errors[rank].code, ErrorCode::kAborted) << errors[rank].message;
  }
}

TEST(RingAttentionFailure, AfterAFailureTheOperatorStaysBroken) {
  RingJob job(job_options(1, 2, milliseconds(200)));
  const auto first = launch_on(job, {0}, {80, 80});
  EXPECT_EQ(first[0].code, ErrorCode::kTimeout);
  EXPECT_EQ(launch_on(job, {0}, {80, 80})[0], first[0]);
}

TEST(RingAttentionFailure, WrongArgumentsChangeNothing) {
  RingJob job(job_options(1, 1, std::chrono::seconds(60)));
  std::vector<std::uint16_t> some(80 * 2 * 64, 0);
  std::vector<std::uint16_t> out(some.size(), 0x1234);
  RingAttentionTensors good;
  good.q = good.k = good.v = some.data();
  good.out = out.data();
  const auto error = [&](const RingAttentionTensors& tensors, std::uint64_t seq) {
    const auto result = job.op(0).launch(tensors, seq);
    if (result) return std::string("none");
    EXPECT_EQ(result.error().code, ErrorCode::kInvalidArgument);
    return result.error().message;
  };
  EXPECT_TRUE(contains(error(good, 1), "a sequence of 1 rows"));
  EXPECT_TRUE(contains(error(good, 0), "a sequence of 0 rows"));
  EXPECT_TRUE(contains(error(good, 81), "2 (one for each of the ranks' parts) to 80"));
  RingAttentionTensors bad = good;
  bad.q = nullptr;
  EXPECT_TRUE(contains(error(bad, 80), "q is null"));
  bad = good;
  bad.k = nullptr;
  EXPECT_TRUE(contains(error(bad, 80), "k is null"));
  bad = good;
  bad.v = nullptr;
  EXPECT_TRUE(contains(error(bad, 80), "v is null"));
  bad = good;
  bad.out = nullptr;
  EXPECT_TRUE(contains(error(bad, 80), "out is null"));
  bad = good;
  bad.v_strides.row = 63;
  EXPECT_TRUE(contains(error(bad, 80), "rows of v are 63 elements apart; they have 64"));
  bad = good;
  bad.q_strides.head = 80 * 64;
  bad.q_strides.row = 64;
  EXPECT_TRUE(contains(error(bad, 80), "on CPUs the heads of a row follow each other, 64 apart"));
  bad = good;
  bad.lse_strides.head = 80;
  bad.lse_strides.row = 1;
  EXPECT_TRUE(contains(error(bad, 80), "heads of lse are 80 elements apart"));
  bad = good;
  bad.scale = std::nan("");
  EXPECT_TRUE(contains(error(bad, 80), "a scale of nan"));
  EXPECT_EQ(job.op(0).epoch(), 0u);
  EXPECT_EQ(out, std::vector<std::uint16_t>(some.size(), 0x1234));
  EXPECT_EQ(error(good, 80), "none");
}

TEST(RingAttentionFailure, ContextsThatDoNotFitAreRefused) {
  RingJob job(job_options(2, 1, std::chrono::seconds(60)));
  CpuOptions options;
  RankContext context = job.cluster().context(0);
  context.flag_count = job.plan().flag_count() - 1;
  EXPECT_FALSE(RingAttentionCpu::create(job.plan(), context, options));
  options.blocks.compute = 0;
  EXPECT_FALSE(RingAttentionCpu::create(job.plan(), job.cluster().context(0), options));
}

}  // namespace
}  // namespace mk::kernels::testing
