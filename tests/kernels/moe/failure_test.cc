// What goes wrong in a launch of MoE Dispatch+GEMM: wrong arguments change nothing, too many rows
// fail one rank and no other, and what a failed wait was for is named.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <string>
#include <vector>

#include "tests/kernels/moe/job.h"
#include "tests/kernels/support/network.h"
#include "tests/kernels/support/routed_tests.h"

namespace mk::kernels::testing {
namespace {

MoeJobOptions job_options(std::uint32_t nodes, std::uint32_t locals, milliseconds timeout) {
  MoeJobOptions options;
  options.nodes = nodes;
  options.locals = locals;
  options.shape = {20, 24, 40, 6, 2, 0};
  options.tiling = {8, 16, 320, 0};
  options.cpu.wait_timeout = timeout;
  return options;
}

/// Launches on those ranks at the same time, with room for capacity[rank] rows.
std::vector<MoeRankResult> launch_on(MoeJob& job, const std::vector<std::uint32_t>& ranks,
                                     const MoeLaunch& launch,
                                     const std::vector<std::uint32_t>& capacity) {
  return launch_together(job.size(), ranks, [&](std::uint32_t rank) {
    return job.launch(rank, launch, capacity[rank]);
  });
}

TEST(MoeDispatchFailure, TooManyRowsFailThatRankBeforeAnythingIsStoredAndNoOther) {
  MoeJob job(job_options(2, 2, std::chrono::seconds(120)));
  NetworkThread network(job.cluster(), 1);
  for (std::uint32_t round = 0; round < 4; ++round) {
    const MoeLaunch launch{Skew::kUniform, false, round % 2 == 0 ? Mode::kFused : Mode::kUnfused,
                           round};
    const auto sources = job.sources(launch);
    std::vector<std::uint32_t> capacity(4, job.plan().shape.rows_max);
    const std::uint32_t poor = round % 4;
    const auto needed = static_cast<std::uint32_t>(job.reference(poor, sources).rows().size());
    ASSERT_GT(needed, 1u);
    capacity[poor] = needed - 1;
    const auto results = launch_on(job, {0, 1, 2, 3}, launch, capacity);
    for (std::uint32_t rank = 0; rank < 4; ++rank) {
      if (rank != poor) {
        EXPECT_EQ(job.check_rank(rank, job.reference(rank, sources), results[rank]), "");
        continue;
      }
      ASSERT_FALSE(results[rank].stats);
      const Error& error = results[rank].stats.error();
      EXPECT_EQ(error.code, ErrorCode::kLimitExceeded);
      EXPECT_TRUE(contains(error.message, fmt::format("{} rows", needed))) << error.message;
      EXPECT_TRUE(contains(error.message, fmt::format("room for {}", needed - 1))) << error.message;
      for (std::uint16_t value : results[rank].y) ASSERT_EQ(value, 0x7fff);
      EXPECT_TRUE(results[rank].rows.empty());
    }
  }
  // With just enough room all is well again.
  const MoeLaunch launch{Skew::kUniform, false, Mode::kFused, 0};
  const auto sources = job.sources(launch);
  std::vector<std::uint32_t> capacity;
  for (std::uint32_t rank = 0; rank < 4; ++rank) {
    capacity.push_back(static_cast<std::uint32_t>(job.reference(rank, sources).rows().size()));
  }
  EXPECT_EQ(job.check(launch, launch_on(job, {0, 1, 2, 3}, launch, capacity)), "");
  EXPECT_EQ(network.stop().complaint(), "");
}

TEST(MoeDispatchFailure, AMissingRankIsNamed) {
  for (const bool adaptive : {false, true}) {
    MoeJobOptions options = job_options(2, 2, milliseconds(2000));
    options.cpu.adaptive = adaptive;
    if (adaptive) options.cpu.blocks.compute = 5;
    MoeJob job(options);
    NetworkThread network(job.cluster(), 2);
    const std::vector<std::uint32_t> capacity(4, job.plan().shape.rows_max);
    const auto results = launch_on(job, {0, 1, 2}, {}, capacity);
    expect_rank_3_named(results, "for rank 3: flag");
    // The operator stays broken.
    const auto again = job.launch(0, {}, capacity[0]);
    ASSERT_FALSE(again.stats);
    EXPECT_EQ(again.stats.error(), results[0].stats.error());
  }
}

TEST(MoeDispatchFailure, AbortWordsEndALaunchLongBeforeItsDeadline) {
  MoeJob job(job_options(2, 2, std::chrono::hours(1)));
  NetworkThread network(job.cluster(), 3);
  const std::vector<std::uint32_t> capacity(4, job.plan().shape.rows_max);
  expect_abort_words_end(job,
                         [&](const auto& ranks) { return launch_on(job, ranks, {}, capacity); });
}

TEST(MoeDispatchFailure, WrongArgumentsChangeNothing) {
  MoeJob job(job_options(1, 1, std::chrono::seconds(120)));
  const MoeLaunch plain{Skew::kUniform, false, Mode::kFused, 0};
  const tools::MoeSource good = job.sources(plain)[0];
  const std::vector<std::uint16_t> weights(6 * 24 * 40, 0);
  std::vector<std::uint16_t> y(40 * 40, 0x7fff);
  const MoeDispatchInput input{good.values.data(), good.ids.data(), good.weights.data(), 20,
                               weights.data()};
  const auto refused = [&](const MoeDispatchInput& wrong, void* to, std::uint32_t capacity,
                           std::string_view part) {
    expect_refused(job.op(0).launch(wrong, to, capacity), part);
  };
  MoeDispatchInput wrong = input;
  wrong.count = 21;
  refused(wrong, y.data(), 40, "21 tokens are not in 0 to 20");
  wrong = input;
  wrong.tokens = nullptr;
  refused(wrong, y.data(), 40, "tokens is null");
  wrong = input;
  wrong.ids = nullptr;
  refused(wrong, y.data(), 40, "ids is null");
  wrong = input;
  wrong.weights = nullptr;
  refused(wrong, y.data(), 40, "weights is null");
  wrong = input;
  wrong.expert_weights = nullptr;
  refused(wrong, y.data(), 40, "expert_weights is null");
  refused(input, nullptr, 40, "y is null");
  refused(input, y.data(), 41, "room for 41 output rows; the operator was made for at most 40");

  auto ids = good.ids;
  ids[2 * 7 + 1] = 6;
  wrong = input;
  wrong.ids = ids.data();
  refused(wrong, y.data(), 40,
          "token 7, slot 1 goes to expert 6; allowed are 0 to 5, and -1 for none");
  ids[2 * 7 + 1] = -2;
  refused(wrong, y.data(), 40, "token 7, slot 1 goes to expert -2");
  auto routing_weights = good.weights;
  routing_weights[2 * 3] = std::nanf("");
  wrong = input;
  wrong.weights = routing_weights.data();
  refused(wrong, y.data(), 40, "the weight of token 3, slot 0 is not a number");

  EXPECT_EQ(job.op(0).epoch(), 0u);
  for (std::uint16_t value : y) ASSERT_EQ(value, 0x7fff);
  EXPECT_EQ(job.check(plain, {job.launch(0, plain, 40)}), "");
}

TEST(MoeDispatchFailure, AContextThatDoesNotFitIsRefused) {
  MoeJob job(job_options(2, 2, std::chrono::seconds(120)));
  expect_unfit_contexts_are_refused<MoeDispatchCpu, MoeDispatchCpuOptions>(job);
}

TEST(MoeDispatchPlan, RefusesWhatItCannotDoAndSaysWhatIsAllowed) {
  expect_impossible_plans_are_refused<MoeDispatchPlan>(
      MoeDispatchShape{20, 24, 40, 6, 2, 0}, [](auto refused) {
        refused([](auto& s) { s.epilogue = static_cast<MoeEpilogue>(3); },
                "there is no epilogue 3");
        refused([](auto& s) { s.rows_max = 161; }, "more than the 160 rows");
      });
}

}  // namespace
}  // namespace mk::kernels::testing
