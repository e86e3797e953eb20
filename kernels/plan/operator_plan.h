/// \file
/// What an operator that exists goes by: the way it runs, and how long a launch of m rows takes in
/// either form. Host only.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/comm/launch_work.h"
#include "kernels/plan/choose.h"
#include "kernels/plan/job_plan.h"

namespace mk::kernels::plan {

/// `machine`, but for what a caller says of it: rates that are not 0.
Machine with_rates(const Machine& machine, const MachineRates& rates);

/// One rank's.
struct OperatorPlan {
  Problem problem;  ///< m: the largest
  std::shared_ptr<const JobPlan> job;
  Machine machine;  ///< the job's, with the caller's rates
  Candidate candidate;

  /// Of a launch of m rows; what LaunchStats tells.
  Estimate expected(std::uint32_t m) const;
  /// What Mode::kAuto runs: the form of the tuned choice for m, if there is one, else the quicker.
  Mode form(std::uint32_t m, const Estimate& expected) const;
  /// Of an AllGather+GEMM: whether tiles of such a launch span all shards.
  bool spans(std::uint32_t m) const;
};

/// The way in which a fused launch of the problem's shape runs. `job` may not be null.
Result<OperatorPlan> plan_operator(const Problem& problem, std::shared_ptr<const JobPlan> job,
                                   const MachineRates& rates);

/// The exchange of an operator on CPUs whose tiling leaves it open. All ranks must choose alike,
/// and know neither each other's links nor cores: so it goes by the shipped CPU's file. `tiling`:
/// what else is named.
Tiling with_exchange(Problem problem, const Tiling& tiling);

/// Of an operator that sums or gathers on one node of several ranks with a GPU each: how often, in
/// ns, a storing warp puts a piece of a tile on its way, where the product takes longer than NVLink
/// does for the tiles; else 0. (All at once a tile stands in the way of the next one's loads.)
/// kernels/cuda/decisions/store_throttle.md.
std::uint32_t tile_pace_ns(const Problem& problem, const Machine& machine,
                           const Candidate& candidate);

}  // namespace mk::kernels::plan
