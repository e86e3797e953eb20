// The planner against recorded sweeps of the MoE layer's halves: each shape ran with several
// numbers of warpgroups that stream. The model's numbers of plans and indexes come from other runs.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "kernels/plan/accounted.h"
#include "kernels/plan/choose.h"
#include "kernels/plan/legal.h"
#include "kernels/plan/model.h"
#include "tests/kernels/plan/problems.h"

namespace mk::kernels::plan {
namespace {

/// The times of one half of a layer, by warpgroups that stream.
std::map<std::uint32_t, double> times_of(const nlohmann::json& us, const std::string& half) {
  const std::string named = half + "_g";
  std::map<std::uint32_t, double> times;
  for (const auto& [side, value] : us.items()) {
    if (side.starts_with(named))
      times[static_cast<std::uint32_t>(std::stoul(side.substr(named.size())))] = value.at("median");
  }
  return times;
}

struct Sweep {
  const char* file;
  std::uint32_t nodes, locals;
  std::size_t numbers;
};

class RecordedExperts : public testing::TestWithParam<Sweep> {};

TEST_P(RecordedExperts, TheChoiceAmongThemIsNearTheBest) {
  const Sweep& sweep = GetParam();
  const std::uint32_t ranks = sweep.nodes * sweep.locals;
  const Machine machine = shipped_machine("H200").value();
  std::ifstream file(std::string(MK_RESULTS "/") + sweep.file);
  const auto json = nlohmann::json::parse(file);
  for (const Op op : {Op::kMoe, Op::kCombine}) {
    const bool dispatch = op == Op::kMoe;
    double logs = 0, worst = 1;
    int count = 0;
    std::vector<double> errors;
    for (const auto& entry : json.at("cases")) {
      const std::uint32_t tokens = ranks * entry.at("tokens").get<std::uint32_t>();
      const std::uint32_t hidden = entry.at("hidden");
      const std::uint32_t features = entry.at("features");
      // Gate and up together are twice the features.
      const Shape shape =
          dispatch ? Shape{tokens, 2 * features, hidden} : Shape{tokens, hidden, features};
      Problem problem = problem_of(op, sweep.nodes, sweep.locals, shape);
      problem.experts = {entry.at("experts"), entry.at("top_k")};
      const auto times = times_of(entry.at("us"), dispatch ? "dispatch" : "combine");
      ASSERT_EQ(times.size(), sweep.numbers);
      double best = HUGE_VAL, least = HUGE_VAL, chosen = 0;
      for (const auto& [stream, us] : times) {
        best = std::min(best, us);
        Candidate candidate = accounted_candidate(problem, {stream, 0});
        ASSERT_TRUE(place_warpgroups(problem, machine, candidate));
        const double predicted = predict(problem, machine, candidate).total;
        errors.push_back(std::abs(predicted / us - 1));
        if (predicted >= least) continue;
        least = predicted;
        chosen = us;
      }
      logs += std::log(chosen / best);
      worst = std::max(worst, chosen / best);
      ++count;
    }
    std::sort(errors.begin(), errors.end());
    std::cout << sweep.file << " " << name_of(op) << ": geometric mean " << std::exp(logs / count)
              << ", worst " << worst << "; error of predicted times, median "
              << errors[errors.size() / 2] << ", nine of ten " << errors[errors.size() * 9 / 10]
              << "\n";
    EXPECT_EQ(count, 6);
    EXPECT_LE(std::exp(logs / count), 1.03) << name_of(op);
    EXPECT_LE(worst, 1.10) << name_of(op);
    // Experts with a few rows each take less than whole tiles of rows would. Over two nodes sums
    // take longer than the model has them.
    EXPECT_LE(errors[errors.size() / 2], sweep.nodes == 1 ? 0.2 : 0.25) << name_of(op);
    EXPECT_LE(errors[errors.size() * 9 / 10], sweep.nodes == 1 ? 0.3 : 0.4) << name_of(op);
  }
}

// Launches of partition_bench: other shapes, with a quarter to four times the number then chosen.
// With few tiles Dispatch+GEMM gains more by warpgroups than the model has it.
TEST(RecordedPartitions, TheChoiceAmongThemIsNearTheBest) {
  const Machine machine = shipped_machine("H200").value();
  for (const Op op : {Op::kMoe, Op::kCombine}) {
    double logs = 0, worst = 1;
    int count = 0;
    for (const char* name : {"partition_h200_1x2.json", "partition_h200_2x1.json"}) {
      std::ifstream file(std::string(MK_RESULTS "/") + name);
      const auto json = nlohmann::json::parse(file);
      for (const auto& row : json.at("rows")) {
        if (row.at("op") != name_of(op)) continue;
        const std::uint32_t ranks = row.at("ranks");
        const std::uint32_t nodes = row.at("nodes");
        const std::vector<std::uint32_t> shape = row.at("shape");  // tokens, hidden, features
        Problem problem = problem_of(op, nodes, ranks / nodes,
                                     op == Op::kMoe ? Shape{ranks * shape[0], shape[2], shape[1]}
                                                    : Shape{ranks * shape[0], shape[1], shape[2]});
        problem.experts = {row.at("experts"), row.at("top_k")};
        double best = HUGE_VAL, least = HUGE_VAL, chosen = 0;
        for (const auto& [side, one] : row.at("partitions").items()) {
          if (side.starts_with("adaptive")) continue;
          const double us = one.at("us").at("median");
          best = std::min(best, us);
          Candidate candidate = accounted_candidate(problem, {one.at("stream_groups"), 0});
          ASSERT_TRUE(place_warpgroups(problem, machine, candidate));
          const double predicted = predict(problem, machine, candidate).total;
          if (predicted >= least) continue;
          least = predicted;
          chosen = us;
        }
        logs += std::log(chosen / best);
        worst = std::max(worst, chosen / best);
        ++count;
      }
    }
    std::cout << "partitions of " << name_of(op) << ": geometric mean " << std::exp(logs / count)
              << ", worst " << worst << "\n";
    EXPECT_EQ(count, 6);
    EXPECT_LE(std::exp(logs / count), op == Op::kMoe ? 1.05 : 1.03) << name_of(op);
    EXPECT_LE(worst, op == Op::kMoe ? 1.18 : 1.10) << name_of(op);
  }
}

// Copy engines where they were quicker, warpgroups where these were: at 128 tokens of a rank.
TEST(RecordedTransports, TheChoiceIsTheQuickerOrNearIt) {
  const Machine machine = shipped_machine("H200").value();
  std::ifstream file(MK_RESULTS "/moe_h200_1x2_transports.json");
  const auto json = nlohmann::json::parse(file);
  double logs = 0, worst = 1;
  int engines = 0, warpgroups = 0;
  for (const auto& entry : json.at("cases")) {
    const std::uint32_t tokens = entry.at("tokens");
    const std::uint32_t features = entry.at("features");
    Problem problem = problem_of(Op::kMoe, 1, 2, {2 * tokens, 2 * features, entry.at("hidden")});
    problem.experts = {entry.at("experts"), entry.at("top_k")};
    const double by_engines = entry.at("us").at("dispatch_engines").at("median");
    const double by_warpgroups = entry.at("us").at("dispatch_warpgroups").at("median");
    const auto choice = choose(problem, machine);
    ASSERT_TRUE(choice) << choice.error().message;
    ++(choice->candidate.engines ? engines : warpgroups);
    const double chosen = choice->candidate.engines ? by_engines : by_warpgroups;
    const double slower = chosen / std::min(by_engines, by_warpgroups);
    logs += std::log(slower);
    worst = std::max(worst, slower);
  }
  EXPECT_EQ(engines, 13);
  EXPECT_EQ(warpgroups, 2);
  EXPECT_LE(std::exp(logs / (engines + warpgroups)), 1.002);
  EXPECT_LE(worst, 1.01);
}

INSTANTIATE_TEST_SUITE_P(Worlds, RecordedExperts,
                         testing::Values(Sweep{"moe_h200_1x1_sweep.json", 1, 1, 7},
                                         Sweep{"moe_h200_1x2_sweep.json", 1, 2, 5},
                                         Sweep{"moe_h200_2x1_sweep.json", 2, 1, 5}),
                         [](const auto& test) {
                           return std::to_string(test.param.nodes) + "x" +
                                  std::to_string(test.param.locals);
                         });

}  // namespace
}  // namespace mk::kernels::plan
