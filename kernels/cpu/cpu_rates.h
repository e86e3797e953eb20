/// \file
/// What the CPU executor takes a machine to do (comm/estimate.h) where nobody says better: by the
/// planner's machine file.
#pragma once

#include <cstdint>

#include "kernels/comm/estimate.h"
#include "kernels/comm/launch.h"
#include "kernels/comm/world.h"
#include "kernels/cpu/cpu_gemm.h"
#include "shm/host/result.h"

namespace mk::kernels {

/// Of one block that has a core of its own.
double block_flops_per_s(GemmPath path);

/// plan::cpu_rates() of the shipped CPU's machine file, with this machine's cores.
MachineRates cpu_rates(const MachineRates& rates, const World& world, const RoleBlocks& blocks,
                       double block_flops_per_s);

/// kInvalidArgument when a rate is negative or not finite.
Status check_rates(const char* op, const MachineRates& rates);

}  // namespace mk::kernels
