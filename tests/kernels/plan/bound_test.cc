// What no launch can beat: each leg by itself, below what is predicted of any way to run it.
#include "kernels/plan/bound.h"

#include <gtest/gtest.h>

#include <cstring>

#include "kernels/plan/choose.h"
#include "tests/kernels/plan/problems.h"

namespace mk::kernels::plan {
namespace {

constexpr Op kAll[] = {Op::kAgGemm, Op::kGemmRs, Op::kGemmAr, Op::kRing, Op::kMoe, Op::kCombine};

Problem problem_over(Op op, std::uint32_t nodes, std::uint32_t locals) {
  Problem problem = problem_of(op, nodes, locals, {16384, 4096, 4096});
  if (op == Op::kRing) problem.shape = {32768, 16, 128};
  problem.experts = {64, 8};
  return problem;
}

TEST(PlanBound, ItsLongestLegIsTheLimit) {
  Bound bound{3, 2, 1};
  EXPECT_DOUBLE_EQ(bound.longest_us(), 3);
  EXPECT_STREQ(bound.limit(), "compute");
  bound += {0, 4, 1};
  EXPECT_DOUBLE_EQ(bound.network_us, 6);
  EXPECT_STREQ(bound.limit(), "network");
  bound += {0, 0, 9};
  EXPECT_STREQ(bound.limit(), "local");
}

// Four H200s with weights of 64 experts; and what crosses, by hand.
TEST(PlanBound, LegsAreBytesAndProductsOverTheMachinesRates) {
  Machine machine = shipped_machine("H200").value();
  machine.network_gb_s = 50;
  const double flops_per_us = 2.0 * 128 * 256 * 64 / machine.step_us_256 * machine.sms;
  const double shard = 16384.0 / 8 * 4096 * 2;
  const auto gather = bound_of(problem_over(Op::kAgGemm, 2, 4), machine);
  ASSERT_TRUE(gather) << gather.error().message;
  EXPECT_NEAR(gather->compute_us, 2.0 * 16384 * 4096 * 4096 / flops_per_us, 1e-6);
  EXPECT_NEAR(gather->network_us, shard / 50e3, 0.01 * shard / 50e3);
  EXPECT_NEAR(gather->local_us, 2 * 3 * shard / (machine.link_gb_s * 1e3), 1e-6);
  const auto scatter = bound_of(problem_over(Op::kGemmRs, 1, 4), machine);
  ASSERT_TRUE(scatter);
  EXPECT_NEAR(scatter->local_us, 16384.0 * 4096 * 2 * 3 / 4 / (machine.link_gb_s * 1e3), 1e-6);
  EXPECT_EQ(scatter->network_us, 0);
  // Each token of 8192 bytes to three others; of its eight rows three quarters.
  const auto moe = bound_of(problem_over(Op::kMoe, 1, 4), machine);
  ASSERT_TRUE(moe);
  EXPECT_NEAR(moe->local_us, 4096.0 * 8192 * 3 / (machine.link_gb_s * 1e3), 1e-6);
  const auto combine = bound_of(problem_over(Op::kCombine, 1, 4), machine);
  ASSERT_TRUE(combine);
  EXPECT_NEAR(combine->local_us, 4096.0 * 8192 * 8 * 3 / 4 / (machine.link_gb_s * 1e3), 1e-6);
  // Few rows: weights are read all the same.
  Problem few = problem_over(Op::kMoe, 1, 4);
  few.shape.m = 64;
  EXPECT_NEAR(bound_of(few, machine)->compute_us,
              16.0 * 4096 * 4096 * 2 / (machine.weights_gb_s * 1e3), 1e-6);
}

TEST(PlanBound, WhatWasMeasuredCountsInTheMachinesPlace) {
  for (const char* name : {"H100", "CPU"}) {
    const Machine machine = shipped_machine(name).value();
    const Problem problem = problem_over(Op::kGemmAr, 2, 2);
    const auto own = bound_of(problem, machine, {10, 100});
    const auto half = bound_of(problem, machine, {5, 50});
    ASSERT_TRUE(own && half);
    EXPECT_DOUBLE_EQ(half->network_us, 2 * own->network_us);
    EXPECT_DOUBLE_EQ(half->local_us, 2 * own->local_us);
    EXPECT_DOUBLE_EQ(half->compute_us, own->compute_us);
  }
}

// Whatever is chosen takes longer, on either kind of machine.
TEST(PlanBound, NoPredictionBeatsIt) {
  for (const char* name : {"H100", "H200", "CPU"}) {
    const Machine machine = shipped_machine(name).value();
    for (const Op op : kAll) {
      for (const auto& [nodes, locals] : {std::pair{1u, 1u}, {1u, 4u}, {2u, 1u}, {2u, 4u}}) {
        const Problem problem = problem_over(op, nodes, locals);
        const auto bound = bound_of(problem, machine);
        ASSERT_TRUE(bound) << name_of(op) << ": " << bound.error().message;
        const auto choice = choose(problem, machine);
        ASSERT_TRUE(choice);
        EXPECT_GT(bound->compute_us, 0);
        EXPECT_LE(bound->longest_us(), 1.001 * choice->time.total)
            << name_of(op) << " " << nodes << " x " << locals << " on " << name << ", by "
            << bound->limit();
      }
    }
  }
}

}  // namespace
}  // namespace mk::kernels::plan
