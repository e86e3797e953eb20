// The planner against a recorded sweep of the MoE layer's halves: each shape ran with seven numbers
// of warpgroups that stream. The model's numbers of plans and indexes come from other runs.
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

TEST(RecordedExperts, TheChoiceAmongThemIsNearTheBest) {
  const Machine machine = shipped_machine("H200").value();
  std::ifstream file(MK_RESULTS "/moe_h200_1x1_sweep.json");
  const auto json = nlohmann::json::parse(file);
  for (const Op op : {Op::kMoe, Op::kCombine}) {
    const bool dispatch = op == Op::kMoe;
    double logs = 0, worst = 1;
    int count = 0;
    std::vector<double> errors;
    for (const auto& entry : json.at("cases")) {
      const std::uint32_t tokens = entry.at("tokens"), hidden = entry.at("hidden");
      const std::uint32_t features = entry.at("features");
      // Gate and up together are twice the features.
      Problem problem = dispatch ? problem_of(op, 1, 1, {tokens, 2 * features, hidden})
                                 : problem_of(op, 1, 1, {tokens, hidden, features});
      problem.experts = {entry.at("experts"), entry.at("top_k")};
      const auto times = times_of(entry.at("us"), dispatch ? "dispatch" : "combine");
      ASSERT_EQ(times.size(), 7u);
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
    std::cout << name_of(op) << ": geometric mean " << std::exp(logs / count) << ", worst " << worst
              << "; error of predicted times, median " << errors[errors.size() / 2]
              << ", nine of ten " << errors[errors.size() * 9 / 10] << "\n";
    EXPECT_EQ(count, 6);
    EXPECT_LE(std::exp(logs / count), 1.03) << name_of(op);
    EXPECT_LE(worst, 1.10) << name_of(op);
    // Experts with a few rows each take less than whole tiles of rows would.
    EXPECT_LE(errors[errors.size() / 2], 0.2) << name_of(op);
    EXPECT_LE(errors[errors.size() * 9 / 10], 0.3) << name_of(op);
  }
}

}  // namespace
}  // namespace mk::kernels::plan
