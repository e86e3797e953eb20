/// \file
/// When a two-shot exchange (ops/gemm_ar/two_shot.h) ends: what waits for what, over the model's
/// rates. Host only; no state.
#pragma once

#include "kernels/plan/candidate.h"
#include "kernels/plan/machine.h"
#include "kernels/plan/timeline.h"

namespace mk::kernels::plan {

/// From the launch's begin on, in us. `time`: predict()'s of the fused candidate, on a GPU. All
/// nodes are alike: what one sends at some time, it also receives, a latency later.
double two_shot_us(const Problem& problem, const Machine& machine, const Candidate& candidate,
                   const Timeline& time);

}  // namespace mk::kernels::plan
