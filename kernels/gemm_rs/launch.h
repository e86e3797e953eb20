/// \file
/// What the blocks of one GEMM + ReduceScatter launch share.
#pragma once

#include "kernels/comm/launch.h"
#include "kernels/gemm_rs/schedule.h"

namespace mk::kernels {

struct GemmRsLaunch : Launch {
  GemmRsGeometry plan;
  GemmRsSchedule schedule;  ///< make_schedule()
  /// This rank's compute blocks add up the tiles of its own shard as they compute them, where a
  /// launch is fused and the world one node; nobody reduces then. Ranks may differ.
  bool sums_own = false;

  /// When m is settled, before the blocks begin.
  void make_schedule() { schedule = GemmRsSchedule(plan, m); }
  MK_HOST_DEVICE bool sums_own_tiles() const {
    return sums_own && mode != Mode::kUnfused && plan.nodes == 1 && plan.locals > 1;
  }
  /// Tiles of other shards that come first: one for each block, so that the others' partials of its
  /// own are there when the first of those are computed.
  MK_HOST_DEVICE std::uint32_t own_lead() const { return blocks.compute; }
};

}  // namespace mk::kernels
