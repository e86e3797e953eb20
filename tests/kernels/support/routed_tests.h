/// \file
/// Tests of the operators whose rows are routed to experts, as far as they are alike.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <iterator>
#include <random>
#include <string_view>
#include <vector>

#include "tests/kernels/support/failures.h"
#include "tests/kernels/support/routed_job.h"

namespace mk::kernels::testing {

/// Launches of every skew and both forms. `more(launch, random)` draws the operator's own.
template <class Launch, class More>
std::vector<Launch> random_routed_launches(std::uint32_t count, std::uint64_t seed, More&& more) {
  std::mt19937_64 random(seed);
  std::vector<Launch> launches;
  for (std::uint32_t i = 0; i < count; ++i) {
    Launch& launch = launches.emplace_back();
    launch.skew = kSkews[random() % std::size(kSkews)];
    launch.uneven = random() % 4 != 0;
    launch.mode = random() % 3 == 0 ? Mode::kUnfused : Mode::kFused;
    launch.inputs = i;
    more(launch, random);
  }
  return launches;
}

/// Ranks 0 to 2 of 2 x 2 name the missing rank 3; rank 2 says `beside`.
template <class RankResult>
void expect_rank_3_named(const std::vector<RankResult>& results, std::string_view beside) {
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
  expect_refused(results[2].stats, beside, ErrorCode::kTimeout);
}

/// `launch(ranks)` on ranks 0 to 2 of 2 x 2.
template <class Job, class Launch>
void expect_abort_words_end(Job& job, Launch&& launch) {
  const auto results = launch_and_abort(job.cluster(), 3, [&] {
    return launch(std::vector<std::uint32_t>{0, 1, 2});
  });
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    ASSERT_FALSE(results[rank].stats);
    EXPECT_EQ(results[rank].stats.error().code, ErrorCode::kAborted);
  }
}

/// An operator of a job of several nodes.
template <class Cpu, class CpuOptions, class Job>
void expect_unfit_contexts_are_refused(Job& job) {
  RankContext bad = job.cluster().context(1);
  bad.flag_count -= 1;
  expect_refused(Cpu::create(job.plan(), bad, CpuOptions{}), "arrival flags");
  CpuOptions options;
  options.blocks.plan = 0;
  expect_refused(Cpu::create(job.plan(), job.cluster().context(1), options),
                 "0 blocks of one role");
}

/// 20 tokens, 2 of 6 experts, and each change that none of these operators allows. `more(refused)`:
/// its own, as `refused(change, part)`.
template <class Plan, class Shape, class More>
void expect_impossible_plans_are_refused(const Shape& good, More&& more) {
  const auto made = [&](const Shape& shape, const Tiling& tiling = {}, DType dtype = DType::kBf16,
                        std::uint32_t nodes = 2) {
    return Plan::make(nodes, 2, shape, dtype, tiling);
  };
  const auto refused = [&](auto change, std::string_view part,
                           ErrorCode code = ErrorCode::kInvalidArgument) {
    Shape shape = good;
    change(shape);
    expect_refused(made(shape), part, code);
  };
  EXPECT_TRUE(made(good, {}, DType::kF16));
  expect_refused(made(good, {}, DType::kBf16, 0), "0 nodes x 2 local ranks");
  refused([](auto& s) { s.tokens_max = 0; }, "tokens_max = 0");
  refused([](auto& s) { s.hidden = 20; }, "hidden = 20");
  refused([](auto& s) { s.features = 41; }, "multiples of 8");
  refused([](auto& s) { s.experts = 0; }, "experts = 0");
  refused([](auto& s) { s.top_k = 7; }, "1 to 6 of 6 experts (top_k), not to 7");
  refused([](auto& s) { s.top_k = 0; }, "not to 0");
  const auto many = [](auto& s) {
    s.tokens_max = 1u << 24;
    s.experts = s.top_k = 256;
  };
  refused(many, "too many rows", ErrorCode::kLimitExceeded);
  expect_refused(made(good, {24, 0, 0, 0}), "tiles of 24 rows");
  expect_refused(made(good, {512, 0, 0, 0}), "a power of two from 8 to 256");
  expect_refused(made(good, {8, 12, 0, 0}), "multiple of 8");
  expect_refused(made(good, {}, static_cast<DType>(9)), "neither bf16 nor f16");
  more(refused);
}

}  // namespace mk::kernels::testing
