/// \file
/// What no launch can beat: each leg of the model by itself, with nothing beside it and nothing
/// before it. Host only; no state.
#pragma once

#include "kernels/plan/candidate.h"
#include "kernels/plan/machine.h"
#include "shm/host/result.h"

namespace mk::kernels::plan {

/// What a run has measured of one rank, in the machine's place. 0: not measured.
struct Measured {
  double network_gb_s = 0;  ///< at which its bytes leave the node, over all of its links
  double local_gb_s = 0;    ///< a CPU's memory, read and written; a GPU's NVLink
};

/// The legs of one rank's launch, in us.
struct Bound {
  double compute_us = 0;
  double network_us = 0;
  double local_us = 0;

  double longest_us() const;
  const char* limit() const;  ///< "compute", "network" or "local": which is the longest
  /// Of a launch and the one that follows it.
  Bound& operator+=(const Bound& next);
};

/// Work and bytes are those that predict() has, of the way that is chosen; rates are what the
/// machine reaches at most. kInvalidArgument, kLimitExceeded: the operator can't do the problem.
Result<Bound> bound_of(const Problem& problem, const Machine& machine,
                       const Measured& measured = {});

}  // namespace mk::kernels::plan
