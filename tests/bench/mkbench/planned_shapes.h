/// \file
/// What mkbench asks the planner (kernels/plan) about: problems as they are typed, and the search
/// for a choice that is quicker than the model's.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/plan/candidate.h"
#include "kernels/plan/machine.h"
#include "shm/host/result.h"

namespace mk::bench {

/// "4096x7168x2048": m of all ranks, n and k as a rank multiplies them. kInvalidArgument.
Result<kernels::Shape> parse_shape(std::string_view text);
/// "ag-gemm", "gemm-rs", "gemm-ar". kInvalidArgument.
Result<kernels::plan::Op> planned_op(std::string_view name);
/// The name of a shipped machine, or a file.
Result<kernels::plan::Machine> machine_named(const std::string& name);

/// The machine whose tuned choices are measured on these GPUs (describe_gpus()): that of `asked`, a
/// shipped name or a file; of nothing, the shipped one of the GPUs. kInvalidArgument: it is shipped
/// for other GPUs, so its entries would have their times; or no file is shipped for these. GPUs
/// that are not seen may be any.
Result<kernels::plan::Machine> machine_to_tune(const std::string& asked, const std::string& gpus);

/// Fused candidates in the order in which a search tries them: by predicted time, the model's
/// choice first, as far as they are predicted to take `factor` of its time at most.
std::vector<kernels::plan::Candidate> candidates_to_try(const kernels::plan::Problem& problem,
                                                        const kernels::plan::Machine& machine,
                                                        double factor);

struct Trial {
  kernels::plan::Candidate candidate;
  double us = 0;
};
/// Measures candidates in their order while `goes_on()`, the first in any case; answers those that
/// were, quickest first. What cannot be measured is told to `tell` and left out; kUnavailable if
/// that is all.
Result<std::vector<Trial>> try_candidates(
    const std::vector<kernels::plan::Candidate>& candidates,
    const std::function<Result<double>(const kernels::plan::Candidate&)>& measure,
    const std::function<bool()>& goes_on, const std::function<void(const std::string&)>& tell);

}  // namespace mk::bench
