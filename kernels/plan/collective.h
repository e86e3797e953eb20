/// \file
/// AllGather and ReduceScatter by themselves on GPUs: the time that a launch takes, and its bound.
/// Host only; no state.
#pragma once

#include <cstdint>

#include "kernels/comm/types.h"
#include "kernels/plan/bound.h"
#include "kernels/plan/candidate.h"
#include "kernels/plan/machine.h"
#include "kernels/plan/timeline.h"

namespace mk::kernels::plan {

/// A launch of one of them.
struct Collective {
  bool sums = false;  ///< ReduceScatter; else AllGather
  std::uint32_t nodes = 1;
  std::uint32_t locals = 1;
  double bytes = 0;              ///< of all m rows
  std::uint32_t warpgroups = 0;  ///< AllGather: that share rows
};
/// `problem` has rows_alone; `warpgroups` as of a whole GPU.
Collective collective_of(const Problem& problem);

/// Bytes that one rank moves in a launch.
struct CollectiveBytes {
  double link = 0;     ///< stored to the node's others
  double memory = 0;   ///< read or written in this rank's memory, the others' stores included
  double network = 0;  ///< sent to other nodes
};
CollectiveBytes bytes_moved(const Collective& collective);

/// `form`: kFused or kUnfused. The Timeline has the time at memory in `sums`.
Timeline predict(const Collective& collective, const Machine& machine, Mode form);
/// Each leg at the machine's best rate. A GPU's memory and NVLink are one, `local_us`: nothing is
/// computed but sums, which go as fast as memory does.
Bound bound_of(const Collective& collective, const Machine& machine, const Measured& measured = {});

}  // namespace mk::kernels::plan
