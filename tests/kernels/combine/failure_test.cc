// What can go wrong with GEMM+Combine on the CPU: wrong arguments are refused before anything
// happens, handles that do not fit are named, and what a failed wait was for is named.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "tests/kernels/combine/job.h"
#include "tests/kernels/support/network.h"

namespace mk::kernels::testing {
namespace {

using std::chrono::milliseconds;

CombineJobOptions job_options(std::uint32_t nodes, std::uint32_t locals, milliseconds timeout) {
  CombineJobOptions options;
  options.nodes = nodes;
  options.locals = locals;
  options.shape = {20, 24, 40, 6, 2, CombinePartials::kElement};
  options.tiling = {8, 16, 128, 0};
  options.cpu.wait_timeout = timeout;
  return options;
}

bool contains(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

std::vector<CombineRankResult> launch_on(CombineJob& job, const std::vector<std::uint32_t>& ranks,
                                         const std::vector<CombineRankInput>& inputs) {
  std::vector<CombineRankResult> results(job.size());
  std::vector<std::thread> threads;
  for (std::uint32_t rank : ranks) {
    threads.emplace_back(
        [&, rank] { results[rank] = job.launch(rank, inputs[rank], false, Mode::kFused); });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
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
  ASSERT_FALSE(results[0].stats);
  EXPECT_EQ(results[0].stats.error().code, ErrorCode::kInvalidArgument);
  EXPECT_TRUE(contains(results[0].stats.error().message,
                       "the rows that rank 3 combines are not those of this rank's 20 tokens"))
      << results[0].stats.error().message;
  for (std::uint16_t value : results[0].out) ASSERT_EQ(value, 0x7fff);
  for (const std::uint32_t rank : {1u, 2u, 3u}) EXPECT_TRUE(results[rank].stats);
  // Ids that were not dispatched: then it is the first rank that knows better.
  inputs = job.inputs(kPlain);
  inputs[1].routing.ids[7] = -1;
  const auto others = launch_on(job, {0, 1, 2, 3}, inputs);
  ASSERT_FALSE(others[1].stats);
  EXPECT_TRUE(contains(others[1].stats.error().message, "are not those of this rank's 20 tokens"))
      << others[1].stats.error().message;
  EXPECT_TRUE(others[0].stats && others[2].stats && others[3].stats);
  const auto whole = job.inputs(kPlain);
  EXPECT_EQ(job.check(kPlain, whole, launch_on(job, {0, 1, 2, 3}, whole)), "");
}

TEST(CombineFailure, AMissingRankIsNamed) {
  CombineJob job(job_options(2, 2, milliseconds(2000)));
  NetworkThread network(job.cluster(), 2);
  const auto inputs = job.inputs(kPlain);
  const auto results = launch_on(job, {0, 1, 2}, inputs);
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    ASSERT_FALSE(results[rank].stats);
    const Error& error = results[rank].stats.error();
    EXPECT_TRUE(error.code == ErrorCode::kTimeout || error.code == ErrorCode::kAborted);
    // Node 0 hears of it only through its rails: rank 0 may be the first there to give up, on
    // rank 2, which waits for rank 3 itself. Every other wait is for rank 3.
    EXPECT_TRUE(contains(error.message, "for rank 3: flag") ||
                contains(error.message, "on the same node failed") ||
                (rank == 0 && contains(error.message, "for rank 2: flag arrival[node 1]")))
        << error.message;
  }
  const Error& beside = results[2].stats.error();
  EXPECT_EQ(beside.code, ErrorCode::kTimeout);
  EXPECT_TRUE(contains(beside.message, "for rank 3: flag rows-indexed[local rank 1]"))
      << beside.message;
  // The operator stays broken.
  const auto again = job.launch(0, inputs[0], false, Mode::kFused);
  ASSERT_FALSE(again.stats);
  EXPECT_EQ(again.stats.error(), results[0].stats.error());
}

TEST(CombineFailure, AbortWordsEndALaunchLongBeforeItsDeadline) {
  CombineJob job(job_options(2, 2, std::chrono::hours(1)));
  NetworkThread network(job.cluster(), 3);
  std::thread aborter([&] {
    std::this_thread::sleep_for(milliseconds(50));
    for (std::uint32_t rank = 0; rank < 3; ++rank)
      shm::store_release(&job.cluster().rank(rank).session_abort, 1u);
  });
  const auto results = launch_on(job, {0, 1, 2}, job.inputs(kPlain));
  aborter.join();
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    ASSERT_FALSE(results[rank].stats);
    EXPECT_EQ(results[rank].stats.error().code, ErrorCode::kAborted);
  }
}

TEST(CombineFailure, WrongArgumentsChangeNothing) {
  CombineJob job(job_options(1, 1, std::chrono::seconds(120)));
  const auto inputs = job.inputs(kPlain);
  const CombineRankInput& good = inputs[0];
  std::vector<std::uint16_t> out(20 * 24, 0x7fff);
  const CombineInput input{good.y.data(),         good.handle.rows,        good.handle.offsets,
                           job.weights(0).data(), good.routing.ids.data(), 20};
  const auto refused = [&](const CombineInput& wrong, void* to, std::string_view part) {
    const auto result = job.op(0).launch(wrong, to);
    ASSERT_FALSE(result) << part;
    EXPECT_EQ(result.error().code, ErrorCode::kInvalidArgument);
    EXPECT_TRUE(contains(result.error().message, part)) << result.error().message;
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
  const auto refused = [&](const RankContext& context, const CombineCpuOptions& options,
                           std::string_view part) {
    const auto op = CombineCpu::create(job.plan(), context, options);
    ASSERT_FALSE(op);
    EXPECT_EQ(op.error().code, ErrorCode::kInvalidArgument);
    EXPECT_TRUE(contains(op.error().message, part)) << op.error().message;
  };
  RankContext bad = job.cluster().context(1);
  bad.flag_count -= 1;
  refused(bad, {}, "arrival flags");
  CombineCpuOptions options;
  options.blocks.plan = 0;
  refused(job.cluster().context(1), options, "0 blocks of one role");
}

TEST(CombinePlan, RefusesWhatItCannotDoAndSaysWhatIsAllowed) {
  const CombineShape good{20, 24, 40, 6, 2, CombinePartials::kF32};
  const auto refused = [&](std::uint32_t nodes, const CombineShape& shape, const Tiling& tiling,
                           std::string_view part, ErrorCode code = ErrorCode::kInvalidArgument,
                           DType dtype = DType::kBf16) {
    const auto plan = CombinePlan::make(nodes, 2, shape, dtype, tiling);
    ASSERT_FALSE(plan) << part;
    EXPECT_EQ(plan.error().code, code);
    EXPECT_TRUE(contains(plan.error().message, part)) << plan.error().message;
  };
  const auto with = [&](auto change) {
    CombineShape shape = good;
    change(shape);
    return shape;
  };
  EXPECT_TRUE(CombinePlan::make(2, 2, good, DType::kF16, {}));
  refused(0, good, {}, "0 nodes x 2 local ranks");
  refused(2, with([](auto& s) { s.tokens_max = 0; }), {}, "tokens_max = 0");
  refused(2, with([](auto& s) { s.hidden = 20; }), {}, "hidden = 20");
  refused(2, with([](auto& s) { s.features = 41; }), {}, "multiples of 8");
  refused(2, with([](auto& s) { s.experts = 0; }), {}, "experts = 0");
  refused(2, with([](auto& s) { s.top_k = 7; }), {}, "1 to 6 of 6 experts (top_k), not to 7");
  refused(2, with([](auto& s) { s.top_k = 0; }), {}, "not to 0");
  refused(2, with([](auto& s) { s.partials = static_cast<CombinePartials>(2); }), {},
          "in fp32 (1), not as 2");
  refused(2, with([](auto& s) {
            s.tokens_max = 1u << 24;
            s.experts = s.top_k = 256;
          }),
          {}, "too many rows", ErrorCode::kLimitExceeded);
  refused(2, good, {24, 0, 0, 0}, "tiles of 24 rows");
  refused(2, good, {512, 0, 0, 0}, "a power of two from 8 to 256");
  refused(2, good, {8, 12, 0, 0}, "multiple of 8");
  refused(2, good, {}, "neither bf16 nor f16", ErrorCode::kInvalidArgument, static_cast<DType>(9));
}

}  // namespace
}  // namespace mk::kernels::testing
