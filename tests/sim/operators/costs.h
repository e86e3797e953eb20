/// \file
/// The costs of a launch's roles in virtual time: a tile, a copy, a sum, a command. They are the
/// numbers of the planner's machine (kernels/plan), which its formulas go by, too.
#pragma once

#include <cstdint>

#include "kernels/plan/candidate.h"
#include "kernels/plan/machine.h"
#include "shm/host/result.h"

namespace mk::sim {

/// A role's blocks move so many GB/s together, of one rank's local copies and sums.
struct LocalRate {
  double beside = 0;  ///< while the rank computes
  double alone = 0;   ///< when its tiles are all computed
};

struct Costs {
  std::uint32_t compute_threads = 1;  ///< which stand for all compute blocks
  double compute_us = 0;              ///< of all tiles, on all compute blocks
  double shared_compute_us = 0;  ///< likewise, once the blocks that share rows compute too; 0: same
  double gather_compute_us = 0;  ///< and once those that receive rows do; 0: same
  LocalRate share;               ///< rows to the local ranks
  LocalRate pass_on;             ///< rows that came over the network
  LocalRate sum_sent;            ///< sums for other nodes, and of what stays
  LocalRate sum_come;            ///< sums of what came
  double store_gb_s = 0;         ///< tiles to their owners on the node; 0: no time
  double store_beside_share = 0;  ///< of a store's time that its tile takes longer
  LocalRate pull;                 ///< tokens into the rows of their experts
  double routing_us = 0;          ///< of a rank's routing plan
  double own_slot_gb_s = 0;       ///< rows to their rank's own slot, for the network; 0: no time
  /// The roles' copies and sums share one memory, and count what they read and write; else each
  /// role has its own rate, and counts what crosses the link, or what it reads.
  bool one_memory = false;
  double network_gb_s = 0;
  double command_us = 0;
  double commit_us = 0;   ///< of the thread that sends keys, beside the network
  double latency_us = 0;  ///< from the last byte sent to its use
  double launch_us = 0;   ///< begin and end
};

/// The costs of a fused launch. The soft edge of the model's maximum, by which a machine's legs
/// hinder each other, is no cost of any one of them. It is not in here.
Result<Costs> costs_of(const kernels::plan::Problem& problem, const kernels::plan::Machine& machine,
                       const kernels::plan::Candidate& candidate);

}  // namespace mk::sim
