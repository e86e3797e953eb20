/// \file
/// What the blocks of one AllGather+GEMM launch share.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/comm/launch.h"
#include "kernels/gather/chunks_sent.h"
#include "kernels/gather/copy_job.h"
#include "kernels/gather/sharing.h"
#include "kernels/ops/ag_gemm/geometry.h"
#include "kernels/ops/ag_gemm/schedule.h"

namespace mk::kernels {

struct AgGemmLaunch : Launch {
  AgGemmGeometry plan;
  AgGemmSchedule schedule;              ///< make_schedule()
  GatherSource shard;                   ///< this rank's rows of A, in the caller's memory
  const std::uint16_t* bias = nullptr;  ///< the caller's, of this rank's n columns; or null
  std::byte* gathered = nullptr;    ///< where the caller wants the whole A, m rows packed; or null
  std::uint32_t collect_parts = 1;  ///< of each chunk on its way there: an executor's choice
  bool in_place = false;            ///< `shard` is what AgGemmPlan::in_place says
  bool spans = false;               ///< of this rank, where AgGemmSchedule::may_span()
  Arrival arrival = Arrival::kSideBySide;  ///< of the node's rows, and the order of their tiles
  gather::Sharing sharing;                 ///< but where they are shared in turn by blocks
  gather::PassingOn onward;                ///< of what comes over the network

  /// When m is settled, before the blocks begin.
  void make_schedule() { schedule = AgGemmSchedule(plan, context.world, m, spans); }
  /// Chunks that this rank sends to other nodes.
  std::uint32_t chunks_sent() const {
    return gather_chunks_sent(schedule.gather(),
                              [this](std::uint32_t rank) { return schedule.shard(rank).count; });
  }
};

}  // namespace mk::kernels
