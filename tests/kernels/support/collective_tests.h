/// \file
/// A collective on the CPU executor, ranks as threads of one process: right for every world and
/// whatever the skew, the same bits again, and when something goes wrong an error that names who
/// and what. Of an operator's struct (collective_job.h).
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "tests/kernels/support/collective_job.h"
#include "tests/kernels/support/every_world.h"
#include "tests/kernels/support/failures.h"
#include "tests/kernels/support/network.h"
#include "tests/kernels/support/same_bits.h"

namespace mk::kernels::testing {

inline CollectiveOptions collective_options(std::uint32_t nodes, std::uint32_t locals,
                                            milliseconds timeout = std::chrono::seconds(120)) {
  CollectiveOptions options;
  options.nodes = nodes;
  options.locals = locals;
  options.m_max = 40;
  options.n = 24;
  options.tiling = {8, 16, 256, 0};
  options.cpu.wait_timeout = timeout;
  return options;
}

/// Every element of every rank, and the bytes on the network, of launches with changing m.
template <class Op>
void expect_right(const CollectiveOptions& options, std::uint32_t launches_count) {
  SCOPED_TRACE(fmt::format("{} x {}, {} x {} {}, seed {}", options.nodes, options.locals,
                           options.m_max, options.n, name_of(options.dtype), options.seed));
  CollectiveJob<Op> job(options);
  NetworkThread network(job.cluster(), options.seed);
  const auto launches = random_collective_launches(launches_count, options.m_max, options.seed);
  const auto results = job.run(launches, std::chrono::microseconds(2000));
  expect_right_launches(job, network, launches, results,
                        [&](std::size_t i, std::uint32_t rank, const LaunchStats& stats) {
                          const World& world = job.cluster().rank(rank).world;
                          EXPECT_EQ(stats.network_bytes,
                                    Op::network_bytes(job.plan(), world, launches[i].m));
                        });
}

template <class Op>
class Collective : public ::testing::Test {};
TYPED_TEST_SUITE_P(Collective);

TYPED_TEST_P(Collective, IsRightInEveryWorldForChangingM) {
  for (std::uint32_t nodes = 1; nodes <= 4; ++nodes) {
    for (std::uint32_t locals : {1u, 2u, 3u, 4u, 8u}) {
      CollectiveOptions options = collective_options(nodes, locals);
      options.seed = nodes * 100 + locals;
      std::mt19937_64 random(options.seed);
      options.m_max = 61;
      options.n = 20 + static_cast<std::uint32_t>(random() % 40);
      options.dtype = static_cast<DType>(random() % 3);
      options.partials = random() % 2 == 0 ? Partials::kElement : Partials::kF32;
      // Rows straddle chunks; the smallest ring: credits run out.
      options.tiling = {8, 16, 64, nodes == 3 ? 1u : 0u};
      options.slot_count_log2 = 4;
      const auto blocks = [&] { return static_cast<std::uint32_t>(1 + random() % 2); };
      options.cpu.blocks = {blocks(), blocks(), blocks(), blocks(), blocks(), 1, 1};
      expect_right<TypeParam>(options, 6);
      if (this->HasFailure()) return;
    }
  }
}

TYPED_TEST_P(Collective, ChoosesItsChunksForALargeMatrix) {
  for (DType dtype : {DType::kBf16, DType::kF32}) {
    CollectiveOptions options = collective_options(2, 2);
    options.m_max = 700;
    options.n = 1100;
    options.dtype = dtype;
    options.tiling = {};
    expect_right<TypeParam>(options, 3);
  }
}

TYPED_TEST_P(Collective, RepeatedRunsGiveTheSameBits) {
  for (DType dtype : {DType::kBf16, DType::kF32}) {
    CollectiveOptions options = collective_options(2, 3);
    options.dtype = dtype;
    options.cpu.blocks.compute = 2;
    CollectiveJob<TypeParam> job(options);
    CollectiveLaunch launch;
    launch.m = 37;
    expect_same_bits_each_time(job, launch, 8, &CollectiveJob<TypeParam>::Outcome::output);
  }
}

TYPED_TEST_P(Collective, ManyLaunchesBackToBackReadNoStaleFlag) {
  for (std::uint32_t banks : {1u, 2u}) {
    CollectiveOptions options = collective_options(3, 2);
    options.m_max = 24;
    options.tiling = {4, 8, 64, banks};
    CollectiveJob<TypeParam> job(options);
    NetworkThread network(job.cluster(), 6);
    const auto launches = random_collective_launches(100, options.m_max, 6);
    const auto results = job.run(launches);
    for (std::size_t i = 0; i < launches.size(); ++i) {
      ASSERT_EQ(job.check(launches[i], results[i]), "")
          << "launch " << i + 1 << ", m = " << launches[i].m;
    }
    EXPECT_EQ(network.stop().complaint(), "");
  }
}

// By the words of shm/progress.h, from which mkctl who-is-slow names the operator.
TYPED_TEST_P(Collective, TellsPeopleOfEachLaunch) {
  for (const std::uint32_t nodes : {1u, 3u}) {
    CollectiveJob<TypeParam> job(collective_options(nodes, 2));
    NetworkThread network(job.cluster(), 1);
    for (std::uint32_t launch = 1; launch <= 2; ++launch) {
      const CollectiveLaunch plan{38 - launch};
      ASSERT_EQ(job.check(plan, job.run({plan})[0]), "");
      for (std::uint32_t rank = 0; rank < job.size(); ++rank) {
        const shm::Progress& words = job.cluster().rank(rank).progress;
        EXPECT_EQ(shm::kProgressOperators[words.op], TypeParam::kTold);
        EXPECT_EQ(words.epoch, launch);
        EXPECT_EQ(words.m, plan.m);
        EXPECT_EQ(words.sizes[0], TypeParam::told_size(job.plan()));
        EXPECT_FALSE(shm::kProgressSizeNames[words.op][0].empty());
        EXPECT_EQ(words.chunks != 0, nodes > 1);
        EXPECT_EQ(words.chunks_done, words.chunks);
        for (const std::uint64_t word : words.roles)
          EXPECT_EQ(shm::decode_role(word).running, 0u) << "nobody runs";
      }
    }
    EXPECT_EQ(network.stop().complaint(), "");
  }
}

REGISTER_TYPED_TEST_SUITE_P(Collective, IsRightInEveryWorldForChangingM,
                            ChoosesItsChunksForALargeMatrix, RepeatedRunsGiveTheSameBits,
                            ManyLaunchesBackToBackReadNoStaleFlag, TellsPeopleOfEachLaunch);

template <class Op>
class CollectiveFailure : public ::testing::Test {};
TYPED_TEST_SUITE_P(CollectiveFailure);

TYPED_TEST_P(CollectiveFailure, AMissingRankIsNamed) {
  for (const auto& [nodes, locals, missing] :
       std::vector<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>>{
           {1, 3, 1}, {2, 2, 3}, {3, 1, 1}}) {
    CollectiveJob<TypeParam> job(collective_options(nodes, locals, kWaitForMissing));
    NetworkThread network(job.cluster(), 1);
    std::vector<std::uint32_t> ranks;
    for (std::uint32_t rank = 0; rank < job.size(); ++rank)
      if (rank != missing) ranks.push_back(rank);
    const auto errors = launch_on(job, ranks, std::vector<std::uint32_t>(job.size(), 40));
    int named = 0;
    for (std::uint32_t rank : ranks) {
      const std::string& text = errors[rank].message;
      const bool names = contains(text, fmt::format("for rank {}: flag", missing));
      named += names && errors[rank].code == ErrorCode::kTimeout;
      EXPECT_TRUE(names || contains(text, "on the same node failed") ||
                  contains(text, "for rank " + std::to_string(missing - missing % locals)))
          << nodes << "x" << locals << ", rank " << rank << ": " << text;
    }
    EXPECT_GE(named, 1) << nodes << "x" << locals;
  }
}

TYPED_TEST_P(CollectiveFailure, AfterAFailureTheOperatorStaysBroken) {
  CollectiveJob<TypeParam> job(collective_options(1, 2, milliseconds(200)));
  const auto first = launch_on(job, {0}, {40, 40});
  EXPECT_EQ(first[0].code, ErrorCode::kTimeout);
  EXPECT_TRUE(contains(first[0].message, "for rank 1: flag")) << first[0].message;
  EXPECT_EQ(launch_on(job, {0}, {40, 40})[0], first[0]);
}

TYPED_TEST_P(CollectiveFailure, AbortWordsEndALaunchLongBeforeItsDeadline) {
  CollectiveJob<TypeParam> job(collective_options(2, 2, std::chrono::hours(1)));
  NetworkThread network(job.cluster(), 2);
  const auto errors = launch_and_abort(job.cluster(), 1, [&] {
    return launch_on(job, {0, 1, 2}, {40, 40, 40, 40});
  });
  for (std::uint32_t rank = 0; rank < 3; ++rank)
    EXPECT_EQ(errors[rank].code, ErrorCode::kAborted) << errors[rank].message;
}

TYPED_TEST_P(CollectiveFailure, RanksWithDifferentMAreNamed) {
  for (const auto& [nodes, locals] : {std::pair{1u, 2u}, {2u, 1u}}) {
    CollectiveJob<TypeParam> job(collective_options(nodes, locals, milliseconds(2000)));
    NetworkThread network(job.cluster(), 3);
    const auto errors = launch_on(job, {0, 1}, {39, 40});
    expect_different_m_named(errors, 39, 40);
  }
}

TYPED_TEST_P(CollectiveFailure, AFullRingNamesTheDaemon) {
  CollectiveOptions options = collective_options(2, 1, milliseconds(1000));
  options.m_max = 400;
  options.slot_count_log2 = 2;
  CollectiveJob<TypeParam> job(options);  // no network: nobody takes commands
  expect_daemon_named(launch_on(job, {0, 1}, {400, 400}));
}

TYPED_TEST_P(CollectiveFailure, WrongArgumentsChangeNothing) {
  CollectiveJob<TypeParam> job(collective_options(1, 1));
  Bytes some(8000);
  const auto refused = [&](const void* input, void* output, std::uint32_t m,
                           std::string_view part) {
    expect_refused(job.op(0).launch(input, output, m, Mode::kFused), part);
  };
  auto* const x = some.data();
  refused(x, x, 0, "m = 0 is not in 1 to 40");
  refused(x, x, 41, "m = 41 is not in 1 to 40");
  refused(nullptr, x, 4, "the input is null");
  refused(x, nullptr, 4, "the output is null");
  EXPECT_EQ(launch_on(job, {0}, {40})[0].code, ErrorCode::kOk);
}

TYPED_TEST_P(CollectiveFailure, AContextThatDoesNotFitIsRefused) {
  CollectiveJob<TypeParam> job(collective_options(2, 2));
  const auto refused = [&](const RankContext& context, const CpuOptions& options,
                           std::string_view part) {
    expect_refused(TypeParam::make(job.plan(), context, options), part);
  };
  const RankContext good = job.cluster().context(1);
  RankContext bad = good;
  bad.world.locals = 1;
  refused(bad, {}, "the plan is for 2 nodes x 2 local ranks, the context for 2 x 1");
  bad = good;
  bad.flag_count -= 1;
  refused(bad, {}, "arrival flags");
  CpuOptions options;
  options.blocks.send = 2;
  refused(good, options, "2 send blocks need as many lanes; the context has 1");
}

REGISTER_TYPED_TEST_SUITE_P(CollectiveFailure, AMissingRankIsNamed,
                            AfterAFailureTheOperatorStaysBroken,
                            AbortWordsEndALaunchLongBeforeItsDeadline, RanksWithDifferentMAreNamed,
                            AFullRingNamesTheDaemon, WrongArgumentsChangeNothing,
                            AContextThatDoesNotFitIsRefused);

}  // namespace mk::kernels::testing
