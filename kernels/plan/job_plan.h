/// \file
/// One plan per job: all ranks plan by rank 0's machine file and tuned.json, which travel as one
/// text when the job is created. Host only.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "kernels/plan/machine.h"
#include "kernels/plan/tuned.h"

namespace mk::kernels::plan {

/// What all ranks of a job plan by. Equal texts give equal choices.
struct JobPlan {
  Machine machine;
  Tuned tuned;
};

/// What rank 0 publishes.
std::string job_plan_text(const JobPlan& plan);
/// What the others read: what job_plan_text wrote, and nothing else. kInvalidArgument.
Result<JobPlan> parse_job_plan(std::string_view text);

/// For a job whose ranks have these machines (rank 0's first): the slower one, as all wait for it.
/// It is the one whose large tile takes longest; of equal ones the first.
const Machine& slowest(std::span<const Machine> machines);

/// What a rank shall log when it plans by another's files: how its own differ from `job`. Empty
/// where they don't. `rank`: whose files `own` are.
std::string difference(const JobPlan& job, const JobPlan& own, std::uint32_t rank);

}  // namespace mk::kernels::plan
