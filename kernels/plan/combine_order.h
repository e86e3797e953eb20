/// \file
/// When a launch of GEMM+Combine on a GPU ends: its tiles are cut, computed and summed one by one,
/// over the model's rates. Host only; no state.
#pragma once

#include "kernels/plan/candidate.h"
#include "kernels/plan/machine.h"
#include "kernels/plan/operator_work.h"
#include "kernels/plan/timeline.h"

namespace mk::kernels::plan {

/// From the end of the index on, in us: the mean of launches with drawn rows. `time`: predict()'s.
double combine_us(const Problem& problem, const Machine& machine, const Candidate& candidate,
                  const Timeline& time, const OrderNumbers& numbers);

}  // namespace mk::kernels::plan
