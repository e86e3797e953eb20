/// \file
/// How long a launch takes by its plan's own account of the work (LaunchWork). So it is predicted
/// where the account is all that the model knows: on CPUs of every operator, on GPUs of Ring
/// Attention and MoE Dispatch. Host only; no state.
#pragma once

#include <cstdint>
#include <string_view>

#include "kernels/comm/launch_work.h"
#include "kernels/plan/machine.h"
#include "kernels/plan/timeline.h"
#include "shm/host/result.h"

namespace mk::kernels::plan {

/// What of a machine a rank computes with.
struct RankShare {
  std::uint32_t locals = 1;          ///< ranks of its node
  std::uint32_t compute_blocks = 1;  ///< threads, or SMs
  /// Of one thread that has a core; 0: as a bf16 product does. A GPU's SMs: 0.
  double block_flops_per_s = 0;
};

/// One SM's of a GPU, in a product that is not at the power limit.
double sm_flops_per_s(const Machine& machine);

/// All that is not `told`, from the machine's numbers; nothing is 0. Where a node's ranks have more
/// compute threads than the CPU has cores, they share those; ranks of other nodes on the same CPU
/// are not seen.
MachineRates rank_rates(const Machine& machine, const MachineRates& told, const RankShare& share);

/// One after the other: the sum of the parts. Overlapped: the longest part hides the others but for
/// the first (or last) step of each, and the steps cost what they cost.
///     unfused = compute + local + network
///     fused   = longest + (unfused - longest) / steps + steps * step_ns
/// A rate of 0: the part counts for nothing.
Timeline predict(const LaunchWork& work, const MachineRates& rates, Mode form);
/// That of both forms.
Estimate expected(const LaunchWork& work, const MachineRates& rates);

/// kInvalidArgument when a rate is negative or not finite. `op`: for messages.
Status check_rates(std::string_view op, const MachineRates& rates);

/// The shipped CPU's machine file, with the cores that are here.
const Machine& cpu_here();

}  // namespace mk::kernels::plan
