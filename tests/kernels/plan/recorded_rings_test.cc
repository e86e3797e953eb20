// The planner against recorded runs of Ring Attention: each shape ran with two or three numbers of
// warpgroups that bring keys. Only the attention core's rate is of the same machine.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/plan/accounted.h"
#include "kernels/plan/legal.h"
#include "kernels/plan/model.h"
#include "tests/kernels/plan/problems.h"

namespace mk::kernels::plan {
namespace {

struct Recorded {
  std::string name;
  Problem problem;
  std::map<std::uint32_t, double> us;  ///< by warpgroups that stream, those that watch included
};

/// Four SMs' are the usual number, which no entry names: less the one that sends and the poller.
std::uint32_t usual_of(std::uint32_t nodes) { return nodes > 1 ? 10 : 12; }

std::vector<Recorded> recorded(const std::string& file, std::uint32_t nodes, std::uint32_t locals) {
  constexpr std::string_view kNamed = "fused_g";
  std::ifstream stream(MK_RESULTS "/" + file);
  const auto json = nlohmann::json::parse(stream);
  std::vector<Recorded> all;
  for (const auto& entry : json.at("cases")) {
    Recorded one;
    one.name = entry.at("case");
    one.problem = problem_of(Op::kRing, nodes, locals,
                             {entry.at("seq"), entry.at("query_heads"), entry.at("dim")});
    one.problem.heads = {entry.at("key_heads"), entry.at("batch"), entry.at("causal")};
    for (const auto& [kind, times] : entry.at("us").items()) {
      if (kind == "fused") one.us[usual_of(nodes)] = times.at("median");
      if (kind.starts_with(kNamed))
        one.us[static_cast<std::uint32_t>(std::stoul(kind.substr(kNamed.size())))] =
            times.at("median");
    }
    if (one.us.size() > 1) all.push_back(one);
  }
  return all;
}

double predicted_us(const Problem& problem, const Machine& machine, std::uint32_t stream) {
  Candidate candidate;
  candidate.stream_warpgroups = stream;
  candidate.send_warpgroups = problem.nodes > 1 ? 1 : 0;
  EXPECT_TRUE(place_warpgroups(problem, machine, candidate));
  return predict(problem, machine, candidate).total;
}

TEST(RecordedRings, TheChoiceAmongThemIsNearTheBest) {
  const Machine machine = shipped_machine("H200").value();
  struct File {
    const char* name;
    std::uint32_t nodes, locals;
  };
  for (const File& file : {File{"ring_h200_1x2_sweep.json", 1, 2}, File{"ring_h200_1x4.json", 1, 4},
                           File{"ring_h200_2x1_sweep.json", 2, 1}}) {
    const auto all = recorded(file.name, file.nodes, file.locals);
    ASSERT_GE(all.size(), 10u) << file.name;
    double logs = 0, worst = 1, usual_logs = 0, usual_worst = 1;
    std::vector<double> errors;
    for (const Recorded& one : all) {
      double best = HUGE_VAL, least = HUGE_VAL, chosen = 0;
      for (const auto& [stream, us] : one.us) {
        best = std::min(best, us);
        const double predicted = predicted_us(one.problem, machine, stream);
        errors.push_back(std::abs(predicted / us - 1));
        if (predicted >= least) continue;
        least = predicted;
        chosen = us;
      }
      const double usual = one.us.at(usual_of(file.nodes)) / best;
      logs += std::log(chosen / best);
      worst = std::max(worst, chosen / best);
      usual_logs += std::log(usual);
      usual_worst = std::max(usual_worst, usual);
      if (chosen > 1.03 * best) std::cout << one.name << ": " << chosen / best << "\n";
    }
    const auto count = static_cast<double>(all.size());
    std::sort(errors.begin(), errors.end());
    std::cout << file.name << ": " << all.size() << " shapes, geometric mean "
              << std::exp(logs / count) << ", worst " << worst << "; always the usual number "
              << std::exp(usual_logs / count) << ", " << usual_worst
              << "; error of predicted times, median " << errors[errors.size() / 2]
              << ", nine of ten " << errors[errors.size() * 9 / 10] << "\n";
    EXPECT_LE(std::exp(logs / count), 1.03) << file.name;
    EXPECT_LE(worst, 1.10) << file.name;
    // Where it matters, choosing is better than not to.
    EXPECT_LT(logs, std::max(usual_logs, 0.01 * count)) << file.name;
  }
}

}  // namespace
}  // namespace mk::kernels::plan
