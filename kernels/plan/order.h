/// \file
/// The order in which rows, keys and sums come on a cluster, and what it costs: launches of Ring
/// Attention, MoE Dispatch and GEMM+Combine on GPUs, step by step. Host only; no state.
#pragma once

#include "kernels/comm/launch_work.h"
#include "kernels/plan/candidate.h"
#include "kernels/plan/machine.h"
#include "kernels/plan/timeline.h"

namespace mk::kernels::plan {

/// How long the launch takes, from its begin on but without Timeline::launch's share of begin and
/// end, in us, when each thing is done as soon as what it needs is there. `time`: its legs by
/// predict(); `work`: the plan's account.
///  - Ring Attention: an item has the keys of its head of every rank. A wave of items waits for the
///    last node's, the next waves only compute.
///  - MoE Dispatch: routing goes round the ring before any token; rows are computed as nodes'
///    tokens come.
///  - GEMM+Combine: a row tile has rows for several nodes, and its sums leave when it is computed.
double ordered_us(const Problem& problem, const Machine& machine, const Candidate& candidate,
                  const LaunchWork& work, const Timeline& time);

}  // namespace mk::kernels::plan
