/// \file
/// How long a fused launch takes by simulation: the door of this folder.
#pragma once

#include <cstdint>

#include "kernels/plan/candidate.h"
#include "kernels/plan/machine.h"
#include "shm/host/result.h"

namespace mk::sim {

struct Simulated {
  double us = 0;                    ///< of the slowest rank, begin and end included
  std::uint64_t network_bytes = 0;  ///< sent by the first rank
  std::uint64_t commands = 0;       ///< of the first rank
  std::uint64_t commands_all = 0;   ///< of all simulated ranks
};

enum class Nodes {
  kAll,  ///< each simulated
  kOne,  ///< node 0, whose mirror the others are (virtual_cluster.h)
};

/// All ranks begin at one time. Tokens draw their experts by `routing_seed`. Errors: what the
/// operator's plan refuses; kInternal: the launch did not end, and where it waits.
Result<Simulated> simulate(const kernels::plan::Problem& problem,
                           const kernels::plan::Machine& machine,
                           const kernels::plan::Candidate& candidate, Nodes nodes,
                           std::uint64_t routing_seed = 1);

}  // namespace mk::sim
