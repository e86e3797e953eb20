/// \file
/// What the planner (kernels/plan) is told and what it tells. It is told a launch's work by the
/// operator's own account, and what a caller says of its machine. It tells how long either form
/// will take.
#pragma once

#include <cstdint>

#include "kernels/comm/types.h"

namespace mk::kernels {

/// What one rank has of the machine. 0: the machine file's number, or nothing is known.
struct MachineRates {
  double flops_per_s = 0;          ///< of its compute blocks together
  double local_bytes_per_s = 0;    ///< read and written by its sums and copies
  double network_bytes_per_s = 0;  ///< sent to other nodes
  double command_ns = 0;           ///< that a command takes besides its bytes
  double step_ns = 0;              ///< that a step of the pipeline costs the fused form: waking who
                                   ///< waits for it, and taking its core from who computes
};

/// What one rank has to do in one launch.
struct LaunchWork {
  double flops = 0;
  double local_bytes = 0;    ///< read and written by sums and copies
  double network_bytes = 0;  ///< sent to other nodes
  std::uint32_t steps = 1;   ///< chunks, the steps in which computing and communicating overlap
  std::uint32_t commands = 0;
};

/// How long a launch will take in either form (plan/account.h, plan/operator_plan.h).
struct Estimate {
  std::uint64_t fused_ns = 0;
  std::uint64_t unfused_ns = 0;

  friend constexpr bool operator==(const Estimate&, const Estimate&) = default;
  /// What Mode::kAuto runs.
  constexpr Mode cheaper() const { return unfused_ns < fused_ns ? Mode::kUnfused : Mode::kFused; }
};

}  // namespace mk::kernels
