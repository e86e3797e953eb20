// AllGather and ReduceScatter by themselves: times near the recorded ones, and what they can't
// beat.
#include "kernels/plan/collective.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/kernels/plan/problems.h"

namespace mk::kernels::plan {
namespace {

constexpr std::uint32_t kColumns = 8192;

Problem problem_over(bool sums, std::uint32_t nodes, std::uint32_t locals, std::uint32_t m) {
  Problem problem = problem_of(sums ? Op::kGemmRs : Op::kAgGemm, nodes, locals,
                               sums ? Shape{m, kColumns, 8} : Shape{m, 8, kColumns});
  problem.rows_alone = true;
  return problem;
}

struct Recorded {
  Problem problem;
  double fused_us = 0, unfused_us = 0;
};

std::vector<Recorded> recorded() {
  std::ifstream stream(MK_RESULTS "/collectives_h200_1x2.json");
  std::vector<Recorded> all;
  const auto json = nlohmann::json::parse(stream);
  for (const auto& run : json.at("runs")) {
    const std::string command = run.at("command");
    EXPECT_NE(command.find("--n 8192 "), std::string::npos) << command;
    const std::string flag = "--m ";
    const auto m =
        static_cast<std::uint32_t>(std::stoul(command.substr(command.find(flag) + flag.size())));
    const bool sums = command.find("reduce-scatter") != std::string::npos;
    const auto us = [&](const char* form) {
      return 1e3 * run.at(form).at("total_ms").at("median").get<double>();
    };
    all.push_back({problem_over(sums, 1, 2, m), us("fused"), us("unfused")});
  }
  return all;
}

// AllGather of 4096 rows was not fitted to; of ReduceScatter there are no other shapes.
TEST(PlanCollective, LaunchesTakeWhatWasRecorded) {
  const Machine machine = shipped_machine("H200").value();
  const auto all = recorded();
  ASSERT_EQ(all.size(), 5u);
  for (const Recorded& one : all) {
    const Collective collective = collective_of(one.problem);
    const double fused = predict(collective, machine, Mode::kFused).total;
    const double unfused = predict(collective, machine, Mode::kUnfused).total;
    EXPECT_NEAR(fused, one.fused_us, 0.1 * one.fused_us) << one.problem.shape.m;
    EXPECT_NEAR(unfused, one.unfused_us, 0.1 * one.unfused_us) << one.problem.shape.m;
    EXPECT_LT(bound_of(one.problem, machine)->longest_us(), one.fused_us);
  }
}

// By hand: a rank of two nodes of four has an eighth of the rows.
TEST(PlanCollective, BytesAreThoseThatCross) {
  const double whole = 4096.0 * kColumns * 2;
  const auto gather = bytes_moved(collective_of(problem_over(false, 2, 4, 4096)));
  EXPECT_DOUBLE_EQ(gather.link, whole / 8 * 2 * 3);
  EXPECT_DOUBLE_EQ(gather.network, whole / 8);
  EXPECT_DOUBLE_EQ(gather.memory, whole / 8 + whole * 7 / 8 + 2 * whole);
  const auto scatter = bytes_moved(collective_of(problem_over(true, 2, 4, 4096)));
  EXPECT_DOUBLE_EQ(scatter.link, whole * 3 / 4);
  EXPECT_DOUBLE_EQ(scatter.network, whole / 8);
  // Read and written to slots, read there, sums of four written; then another node's.
  EXPECT_DOUBLE_EQ(scatter.memory, 3 * whole + whole / 4 + 2 * whole / 8 + 2 * whole / 8);
  const auto alone = bytes_moved(collective_of(problem_over(false, 1, 1, 4096)));
  EXPECT_EQ(alone.link, 0);
  EXPECT_EQ(alone.network, 0);
}

TEST(PlanCollective, NothingIsComputedAndNoPredictionBeatsTheBound) {
  for (const char* name : {"H100", "H200"}) {
    const Machine machine = shipped_machine(name).value();
    for (const bool sums : {false, true}) {
      for (const auto& [nodes, locals] :
           {std::pair{1u, 1u}, {1u, 2u}, {1u, 8u}, {2u, 1u}, {4u, 8u}}) {
        for (const std::uint32_t m : {1u, 1024u, 65536u}) {
          const Problem problem = problem_over(sums, nodes, locals, m);
          const auto bound = bound_of(problem, machine);
          ASSERT_TRUE(bound) << bound.error().message;
          EXPECT_EQ(bound->compute_us, 0);
          EXPECT_STRNE(bound->limit(), "compute");
          EXPECT_EQ(bound->network_us > 0, nodes > 1);
          const Collective collective = collective_of(problem);
          const double fused = predict(collective, machine, Mode::kFused).total;
          EXPECT_LE(bound->longest_us(), 1.001 * fused);
          EXPECT_TRUE(std::isfinite(fused));
        }
      }
    }
  }
  // Rates that a run measured count in the machine's place.
  const Machine machine = shipped_machine("H200").value();
  const Problem problem = problem_over(false, 2, 4, 65536);
  EXPECT_DOUBLE_EQ(bound_of(problem, machine, {5, 10})->local_us,
                   2 * bound_of(problem, machine, {5, 20})->local_us);
  EXPECT_DOUBLE_EQ(bound_of(problem, machine, {5, 20})->network_us,
                   2 * bound_of(problem, machine, {10, 20})->network_us);
}

}  // namespace
}  // namespace mk::kernels::plan
