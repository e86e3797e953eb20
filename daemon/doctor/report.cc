#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "daemon/doctor/checks.h"

namespace mk::doctor {
namespace {

std::size_t count(const std::vector<Finding>& findings, Outcome outcome) {
  return static_cast<std::size_t>(std::ranges::count(findings, outcome, &Finding::outcome));
}

}  // namespace

std::string to_text(const std::vector<Finding>& findings) {
  std::string text;
  for (const Finding& one : findings) {
    text += fmt::format("{}  {:<18} {}\n", outcome_text(one.outcome), one.id, one.evidence);
    if (!one.fix.empty()) text += fmt::format("      {:<18} -> {}\n", "", one.fix);
  }
  return text + fmt::format("{} passed, {} warnings, {} failed, {} skipped\n",
                            count(findings, Outcome::kPass), count(findings, Outcome::kWarn),
                            count(findings, Outcome::kFail), count(findings, Outcome::kSkip));
}

std::string to_json(const std::vector<Finding>& findings) {
  using nlohmann::ordered_json;
  ordered_json json;
  json["checks"] = ordered_json::array();
  for (const Finding& one : findings) {
    json["checks"].push_back({{"id", one.id},
                              {"result", outcome_text(one.outcome)},
                              {"evidence", one.evidence},
                              {"fix", one.fix}});
  }
  json["summary"] = {{"pass", count(findings, Outcome::kPass)},
                     {"warn", count(findings, Outcome::kWarn)},
                     {"fail", count(findings, Outcome::kFail)},
                     {"skip", count(findings, Outcome::kSkip)}};
  return json.dump(2, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace mk::doctor
