/// \file
/// What the blocks of one AllGather + GEMM launch share.
#pragma once

#include <cstddef>

#include "kernels/ag_gemm/geometry.h"
#include "kernels/ag_gemm/schedule.h"
#include "kernels/comm/launch.h"
#include "kernels/gather/copy_job.h"
#include "kernels/gather/sharing.h"

namespace mk::kernels {

struct AgGemmLaunch : Launch {
  AgGemmGeometry plan;
  AgGemmSchedule schedule;           ///< make_schedule()
  GatherSource shard;                ///< this rank's rows of A, in the caller's memory
  std::byte* gathered = nullptr;     ///< where the caller wants the whole A, m rows packed; or null
  bool in_place = false;             ///< `shard` is what AgGemmPlan::in_place says
  bool in_turn = false;              ///< gather::share_in_turn, and tiles in that order
  gather::Sharing sharing;           ///< where they are not shared in turn
  std::uint32_t received_parts = 1;  ///< of each chunk that is passed on: gather::receive

  /// When m is settled, before the blocks begin.
  void make_schedule() { schedule = AgGemmSchedule(plan, context.world, m); }
};

}  // namespace mk::kernels
