// What can go wrong with GEMM+Combine on the CPU: wrong arguments are refused before anything
// happens, handles that do not fit are named, and what a failed wait was for is named.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "tests/kernels/combine/job.h"
#include "tests/kernels/support/network.h"
#include "tests/kernels/support/routed_tests.h"

namespace mk::kernels::testing {
namespace {

CombineJobOptions job_options(std::uint32_t nodes, std::uint32_t locals, milliseconds timeout) {
  CombineJobOptions options;
  options.nodes = nodes;
  options.locals = locals;
  options.shape = {20, 24, 40, 6, 2, CombinePartials::kElement};
  options.tiling = {8, 16, 128, 0};
  options.cpu.wait_timeout = timeout;
  return options;
}

std::vector<CombineRankResult> launch_on(CombineJob& job, const std::vector<std::uint32_t>& ranks,
                                         const std::vector<CombineRankInput>& inputs) {
  return launch_together(job.size(), ranks, [&](std::uint32_t rank) {
    return job.launch(rank, inputs[rank], false, Mode::kFused);
  });
}

const CombineLaunchCase kPlain{Skew::kUniform, false, Mode::kFused, 0};

// A dispatch without room leaves no rows, and offsets that tell of them.
TEST(CombineFailure, ARankWhoseDispatchFailedIsNamedByEveryRankAndAllCanLaunchAgain) {
  CombineJob job(job_options(2, 2, std::chrono::seconds(120)));
  NetworkThread network(job.cluster(), 1);
  for (std::uint32_t poor = 0; poor < 4; ++poor) {
    auto inputs = job.inputs(kPlain);
    const std::size_t needed = inputs[poor].handle.rows.size();
    inputs[poor].handle.rows.clear();
    const auto results = launch_on(job, {0, 1, 2, 3}, inputs);
    for (std::uint32_t rank = 0; rank < 4; ++rank) {
      ASSERT_FALSE(results[rank].stats);
      const Error& error = results[rank].stats.error();
      EXPECT_EQ(error.code, ErrorCode::kLimitExceeded);
      EXPECT_TRUE(contains(error.message, rank == poor ? fmt::format("room for its {} rows", needed)
                                                       : fmt::format("rank {} has no rows", poor)))
          << error.message;
      for (std::uint16_t value : results[rank].out) ASSERT_EQ(value, 0x7fff);
    }
    const auto whole = job.inputs(kPlain);
    EXPECT_EQ(job.check(kPlain, whole, launch_on(job, {0, 1, 2, 3}, whole)), "");
  }
  EXPECT_EQ(network.stop().complaint(), "");
}

// Rank 3 has the rows of another dispatch: all its tokens' ranks see it.
TEST(CombineFailure, RowsOfAnotherDispatchAreRefusedByName) {
  CombineJob job(job_options(2, 2, std::chrono::seconds(120)));
  NetworkThread network(job.cluster(), 2);
  auto inputs = job.inputs(kPlain);
  // A row of rank 0's tokens names another one, whose slot is node 0's: no row of node 1 is there.
  const std::vector<std::int32_t>& ids = inputs[0].routing.ids;
  const auto row = std::find_if(inputs[3].handle.rows.begin(), inputs[3].handle.rows.end(),
                                [](const MoeRow& of) { return of.rank == 0; });
  ASSERT_NE(row, inputs[3].handle.rows.end());
  for (row->token = 0; row->token < 20; ++row->token) {
    const std::int32_t id = ids[std::size_t{row->token} * 2 + row->slot];
    if (id >= 0 && id < 3) break;
  }
  ASSERT_LT(row->token, 20u);
  const auto results = launch_on(job, {0, 1, 2, 3}, inputs);
  expect_refused(results[0].stats,
                 "the rows that rank 3 combines are not those of this rank's 20 tokens");
  for (std::uint16_t value : results[0].out) ASSERT_EQ(value, 0x7fff);
  for (const std::uint32_t rank : {1u, 2u, 3u}) EXPECT_TRUE(results[rank].stats);
  // Ids that were not dispatched: then it is the first rank that knows better.
  inputs = job.inputs(kPlain);
  inputs[1].routing.ids[7] = -1;
  const auto others = launch_on(job, {0, 1, 2, 3}, inputs);
  expect_refused(others[1].stats, "are not those of this rank's 20 tokens");
  EXPECT_TRUE(others[0].stats && others[2].stats && others[3].stats);
  const auto whole = job.inputs(kPlain);
  EXPECT_EQ(job.check(kPlain, whole, launch_on(job, {0, 1, 2, 3}, whole)), "");
}

TEST(CombineFailure, AMissingRankIsNamed) {
  for (const bool adaptive : {false, true}) {
    CombineJobOptions options = job_options(2, 2, milliseconds(2000));
    options.cpu.adaptive = adaptive;
    if (adaptive) options.cpu.blocks.compute = 5;
    CombineJob job(options);
    NetworkThread network(job.cluster(), 2);
    const auto inputs = job.inputs(kPlain);
    const auto results = launch_on(job, {0, 1, 2}, inputs);
    expect_rank_3_named(results, "for rank 3: flag rows-indexed[local rank 1]");
    // The operator stays broken.
    const auto again = job.launch(0, inputs[0], false, Mode::kFused);
    ASSERT_FALSE(again.stats);
    EXPECT_EQ(again.stats.error(), results[0].stats.error());
  }
}

TEST(CombineFailure, AbortWordsEndALaunchLongBeforeItsDeadline) {
  CombineJob job(job_options(2, 2, std::chrono::hours(1)));
  NetworkThread network(job.cluster(), 3);
  const auto inputs = job.inputs(kPlain);
  expect_abort_words_end(job, [&](const auto& ranks) { return launch_on(job, ranks, inputs); });
}

TEST(CombineFailure, WrongArgumentsChangeNothing) {
  CombineJob job(job_options(1, 1, std::chrono::seconds(120)));
  const auto inputs = job.inputs(kPlain);
  const CombineRankInput& good = inputs[0];
  std::vector<std::uint16_t> out(20 * 24, 0x7fff);
  const CombineInput input{good.y.data(),         good.handle.rows,        good.handle.offsets,
                           job.weights(0).data(), good.routing.ids.data(), 20};
  const auto refused = [&](const CombineInput& wrong, void* to, std::string_view part) {
    expect_refused(job.op(0).launch(wrong, to), part);
  };
  const auto with = [&](auto change) {
    CombineInput wrong = input;
    change(wrong);
    return wrong;
  };
  refused(with([](auto& i) { i.count = 21; }), out.data(), "21 tokens are not in 0 to 20");
  refused(with([](auto& i) { i.y = nullptr; }), out.data(), "y is null");
  refused(with([](auto& i) { i.expert_weights = nullptr; }), out.data(), "expert_weights is null");
  refused(with([](auto& i) { i.ids = nullptr; }), out.data(), "ids is null");
  refused(input, nullptr, "out is null");
  auto ids = good.routing.ids;
  ids[2 * 7 + 1] = 6;
  refused(with([&](auto& i) { i.ids = ids.data(); }), out.data(),
          "token 7, slot 1 goes to expert 6; allowed are 0 to 5, and -1 for none");

  std::vector<std::uint32_t> offsets = good.handle.offsets;
  refused(with([&](auto& i) { i.offsets = i.offsets.subspan(1); }), out.data(),
          "6 expert offsets; this rank has 6 experts, so it takes 7");
  offsets[2] = offsets[3] + 1;
  refused(with([&](auto& i) { i.offsets = offsets; }), out.data(), "expert 2 has rows");
  offsets = good.handle.offsets;
  offsets.back() += 1;
  refused(with([&](auto& i) { i.offsets = offsets; }), out.data(),
          "the expert offsets end at row 41, but there are 40 rows");
  std::vector<MoeRow> rows = good.handle.rows;
  const auto impossible = [&](auto change, std::string_view part) {
    rows = good.handle.rows;
    change(rows[5]);
    refused(with([&](auto& i) { i.rows = rows; }), out.data(), part);
  };
  impossible([](MoeRow& row) { row.rank = 1; }, "row 5 is of rank 1, token");
  impossible([](MoeRow& row) { row.token = 20; }, "there are 1 ranks of at most 20 tokens with 2");
  impossible([](MoeRow& row) { row.slot = 2; }, "slot 2; there are");
  const std::vector<MoeRow> many(41);
  offsets = {0, 41, 41, 41, 41, 41, 41};
  refused(with([&](auto& i) {
            i.rows = many;
            i.offsets = offsets;
          }),
          out.data(), "41 rows; 1 ranks of at most 20 tokens with 2 slots can give 40");

  EXPECT_EQ(job.op(0).epoch(), 0u);
  for (std::uint16_t value : out) ASSERT_EQ(value, 0x7fff);
  EXPECT_EQ(job.check(kPlain, inputs, {job.launch(0, good, false, Mode::kFused)}), "");
}

TEST(CombineFailure, AContextThatDoesNotFitIsRefused) {
  CombineJob job(job_options(2, 2, std::chrono::seconds(120)));
  expect_unfit_contexts_are_refused<CombineCpu, CombineCpuOptions>(job);
}

TEST(CombinePlan, RefusesWhatItCannotDoAndSaysWhatIsAllowed) {
  expect_impossible_plans_are_refused<CombinePlan>(
      CombineShape{20, 24, 40, 6, 2, CombinePartials::kF32}, [](auto refused) {
        refused([](auto& s) { s.partials = static_cast<CombinePartials>(2); },
                "in fp32 (1), not as 2");
      });
}

}  // namespace
}  // namespace mk::kernels::testing
