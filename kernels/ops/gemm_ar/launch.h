/// \file
/// What the blocks of one GEMM+AllReduce launch share.
#pragma once

#include "kernels/comm/launch.h"
#include "kernels/ops/gemm_ar/schedule.h"

namespace mk::kernels {

struct GemmArLaunch : Launch {
  GemmArGeometry plan;
  GemmArSchedule schedule;  ///< make_schedule()
  /// This rank's compute blocks add up the tiles that it owns as they compute them. That is where a
  /// launch is fused, the world one node of two ranks, and a chunk a tile. Nobody reduces then.
  /// Ranks may differ; one that owns no tile shows its chunk without any as ever.
  bool accumulates_own = false;
  const std::uint16_t* bias = nullptr;  ///< the caller's, of all columns; or null

  /// When m is settled, before the blocks begin.
  void make_schedule() { schedule = GemmArSchedule(plan, m); }
  /// Chunks that this rank sends to other nodes.
  std::uint32_t chunks_sent() const {
    return schedule.sends(context.world.node, context.world.local);
  }

  MK_HOST_DEVICE bool accumulates_own_tiles() const {
    return accumulates_own && plan.adds_in_place() && mode != Mode::kUnfused && plan.nodes == 1 &&
           plan.locals == 2 && schedule.tiles_per_chunk() == 1 &&
           schedule.owned(context.world.local) != 0;
  }
};

}  // namespace mk::kernels
