/// \file
/// What the CPU executor takes a machine to do (comm/estimate.h) where nobody says better.
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

/// `rates`, with every 0 replaced: `block_flops_per_s` times the compute blocks, and defaults for
/// the rest. Where the node's ranks have more compute blocks than the machine has cores, they share
/// them; ranks of other nodes on the same machine are not seen.
MachineRates cpu_rates(const MachineRates& rates, const World& world, const RoleBlocks& blocks,
                       double block_flops_per_s);

/// kInvalidArgument when a rate is negative or not finite.
Status check_rates(const char* op, const MachineRates& rates);

}  // namespace mk::kernels
