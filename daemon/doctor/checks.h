/// \file
/// The checks: facts in, findings out. Pure.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "daemon/doctor/facts.h"

namespace mk::doctor {

enum class Outcome { kPass, kWarn, kFail, kSkip };
std::string_view outcome_text(Outcome outcome);  ///< "PASS"

struct Finding {
  std::string_view id;  ///< stable: "verbs.gid"
  Outcome outcome = Outcome::kSkip;
  std::string evidence;  ///< what was seen
  std::string fix;       ///< what to do; empty when there is nothing to
};

/// One finding per check, in the order in which troubles explain each other.
std::vector<Finding> examine(const Facts& facts);

/// Lines for users, and the counts.
std::string to_text(const std::vector<Finding>& findings);
std::string to_json(const std::vector<Finding>& findings);
/// 0; 1 when anything failed.
int exit_code(const std::vector<Finding>& findings);

}  // namespace mk::doctor
