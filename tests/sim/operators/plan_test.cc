// The planner's prediction for clusters (kernels/plan/cluster.h) against launches in virtual time.
// Both have their costs of one machine, whose legs hinder each other nowhere: the soft edge of the
// model's maximum is fitted to measured runs, and no cost that a simulation could have.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>

#include "kernels/plan/cluster.h"
#include "tests/sim/operators/simulate.h"

namespace mk::sim {
namespace {

namespace plan = kernels::plan;

constexpr double kSharp = 64;
constexpr double kWithin = 0.05;

plan::Machine sharp_h200() {
  plan::Machine machine = *plan::shipped_machine("H200");
  machine.overlap_ag = machine.overlap_rs = machine.overlap_ar = kSharp;
  return machine;
}

/// Shapes of layers: 4 to 64 Ki rows.
plan::Problem drawn(plan::Op op, std::uint32_t nodes, std::uint64_t seed) {
  std::mt19937_64 random(seed * 1009 + nodes);
  const auto pick = [&](std::uint32_t least, std::uint32_t most) {
    return static_cast<std::uint32_t>(least + random() % (most - least + 1));
  };
  plan::Problem problem;
  problem.op = op;
  problem.nodes = nodes;
  problem.locals = 1u << pick(1, 3);
  problem.named.form = kernels::Mode::kFused;
  const std::uint32_t rows = std::max(4096u << pick(0, 3), problem.ranks() * 64);
  problem.shape = {rows, 1024 * pick(4, 12), 1024 * pick(2, 8)};
  return problem;
}

class Prediction : public ::testing::TestWithParam<plan::Op> {};

TEST_P(Prediction, IsCloseToTheSimulationOverAllNodes) {
  const plan::Machine machine = sharp_h200();
  double worst = 0;
  for (std::uint32_t nodes : {2u, 4u, 8u, 16u, 32u, 64u, 128u, 512u, 1024u}) {
    if (GetParam() != plan::Op::kAgGemm && nodes > 128) continue;
    for (std::uint64_t seed = 1; seed <= 2; ++seed) {
      const plan::Problem problem = drawn(GetParam(), nodes, seed);
      const auto planned = plan::plan_cluster(problem, machine);
      ASSERT_TRUE(planned) << planned.error().message;
      const auto simulated = simulate(problem, machine, planned->choice.candidate, Nodes::kOne);
      ASSERT_TRUE(simulated) << simulated.error().message;
      const double error = planned->time.total / simulated->us - 1;
      worst = std::max(worst, std::abs(error));
      EXPECT_NEAR(error, 0, kWithin) << fmt::format(
          "{} x {}, {} x {} x {}, seed {}: {:.0f} us, simulated {:.0f}; compute "
          "{:.0f}, local {:.0f}, network {:.0f}, wait {:.0f}, sums {:.0f}; {}",
          nodes, problem.locals, problem.shape.m, problem.shape.n, problem.shape.k, seed,
          planned->time.total, simulated->us, planned->time.compute, planned->time.local,
          planned->time.network, planned->time.wait, planned->time.sums,
          plan::describe(problem, planned->choice.candidate));
    }
  }
  RecordProperty("worst_error", fmt::format("{:.4f}", worst));
}
INSTANTIATE_TEST_SUITE_P(Operators, Prediction,
                         ::testing::Values(plan::Op::kAgGemm, plan::Op::kGemmRs, plan::Op::kGemmAr),
                         [](const auto& one) { return std::string(plan::name_of(one.param)); });

}  // namespace
}  // namespace mk::sim
