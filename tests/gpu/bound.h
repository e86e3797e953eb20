/// \file
/// What no launch of an operator is faster than, besides its product.
#pragma once

#include "tests/gpu/operator_ranks.h"

namespace mk::test {

/// In microseconds: the links at their pace, and what an SM's stores reach over NVLink with all of
/// them at it.
struct Bound {
  double network_us = 0;
  double nvlink_us = 0;
};

/// `link_bytes_per_s`: of a rank's rail and direction; 0: unpaced.
inline Bound bound_of(const JobSetup& setup, double link_bytes_per_s) {
  constexpr double kNvlinkBytesPerS = 389e9;
  const bool gathers = setup.op == Op::kAgGemm;
  const double bytes = 2.0 * setup.m * (gathers ? setup.k[0] : setup.n);
  const double world = setup.world();
  const double locals = setup.locals;
  const double nodes = setup.nodes;
  Bound bound;
  // A gather: every shard but the own rail's comes from a neighbour; sums: all partials but the
  // owner's go to it, and the whole result but the own part comes back.
  double over_nvlink = (locals - 1) / locals * bytes;
  double over_network = (nodes - 1) / world * bytes;
  if (setup.op == Op::kGemmAr) {
    over_nvlink *= 2;
    over_network = (nodes - 1) / locals * bytes;
  }
  bound.nvlink_us = over_nvlink / kNvlinkBytesPerS * 1e6;
  if (nodes > 1 && link_bytes_per_s > 0) bound.network_us = over_network / link_bytes_per_s * 1e6;
  return bound;
}

}  // namespace mk::test
