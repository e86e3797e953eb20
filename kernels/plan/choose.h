/// \file
/// The planner's door: the cheapest legal candidate, and why it is so.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "kernels/plan/candidate.h"
#include "kernels/plan/machine.h"
#include "kernels/plan/model.h"
#include "kernels/plan/tuned.h"

namespace mk::kernels::plan {

struct Choice {
  Candidate candidate;
  Timeline time;       ///< predicted
  bool tuned = false;  ///< by an entry of tuned.json
};

/// The candidate of the least predicted time; of equal ones the first. Null if there is none.
const Candidate* cheapest(const Problem& problem, const Machine& machine,
                          std::span<const Candidate> candidates);

/// What a launch shall take: the tuned entry for its bucket, if it is legal, else the cheapest of
/// legal_candidates(). Equal arguments give equal choices, on every rank. `tuned` may be null.
/// kInvalidArgument, kLimitExceeded: the operator can't do the problem at all.
Result<Choice> choose(const Problem& problem, const Machine& machine, const Tuned* tuned = nullptr);

/// A screen: the choice, its terms, and what the next best of other kinds would cost.
Result<std::string> explain(const Problem& problem, const Machine& machine,
                            const Tuned* tuned = nullptr);

}  // namespace mk::kernels::plan
