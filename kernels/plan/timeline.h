/// \file
/// What predict() answers: a launch's time, and what it is made of.
#pragma once

#include <cstdint>

#include "kernels/comm/launch_work.h"

namespace mk::kernels::plan {

/// A launch's time, in us: `total` and what it is made of. Terms overlap; they don't add up.
struct Timeline {
  double launch = 0;   ///< begin, end, flags, steps of a CPU; the network's latency, routing plans
  double tile = 0;     ///< one tile
  double compute = 0;  ///< all tiles, on the SMs that have them
  double local = 0;    ///< NVLink: rows, or partial tiles and results; a CPU's copies and sums
  double passed = 0;   ///< rows from other nodes to the node's others
  double network = 0;  ///< the rail, and copies for it
  double wait = 0;     ///< of the rail, for sums that are not there yet; for the first keys
  double sums = 0;     ///< what is left to sum when all tiles are computed
  double last = 0;     ///< tiles left when the last rows have come; a step of what overlaps
  double total = 0;
};

/// In whole ns, as statistics tell it.
std::uint64_t ns_of(double us);
/// Both forms'.
Estimate estimate_of(const Timeline& fused, const Timeline& unfused);

}  // namespace mk::kernels::plan
