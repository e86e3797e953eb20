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
  /// launch is fused and the world one node of two ranks; nobody reduces then. Ranks may differ.
  bool sums_own = false;

  /// When m is settled, before the blocks begin.
  void make_schedule() { schedule = GemmRsSchedule(plan, m); }
  MK_HOST_DEVICE bool sums_own_tiles() const {
    return sums_own && mode != Mode::kUnfused && plan.nodes == 1 && plan.locals == 2;
  }
};

}  // namespace mk::kernels
