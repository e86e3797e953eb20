/// \file
/// AllGather's launch and its roles: a gather (gather/roles.h says what share, send and receive do,
/// and what waits for what) whose consumer is the caller's memory. An executor brings what
/// gather/roles.h asks for. Compiles for host and device.
///
///     role     does                                   waits for
///     share    this rank's rows -> its node, its send blocks
///     send     the rows of its rail -> next node      what it sends
///     receive  arrived rows -> its node               arrivals
///     collect  all rows -> the caller's output        the chunk; unfused: everything
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/comm/launch.h"
#include "kernels/comm/shard.h"
#include "kernels/gather/chunks_sent.h"
#include "kernels/gather/collect.h"
#include "kernels/gather/geometry.h"
#include "kernels/gather/roles.h"

namespace mk::kernels {

/// For the operator's lifetime; spec.h makes it.
struct AllGatherGeometry {
  std::uint32_t nodes = 1;
  std::uint32_t locals = 1;
  std::uint32_t m_max = 0;  ///< rows of all ranks, at most
  std::uint32_t n = 0;      ///< elements of a row
  DType dtype = DType::kBf16;
  GatherGeometry gather;
  std::uint64_t workspace_bytes = 0;
};

struct AllGatherLaunch : Launch {
  AllGatherGeometry plan;
  GatherSchedule schedule;   ///< make_schedule()
  Shards shards;             ///< make_schedule()
  GatherSource rows;         ///< this rank's, in the caller's memory
  bool in_place = false;     ///< they are what AllGatherPlan::in_place says
  std::byte* all = nullptr;  ///< the caller's output: m rows
  gather::Sharing sharing;
  gather::PassingOn onward;
  std::uint32_t collect_parts = 1;  ///< of each chunk on its way to `all`: an executor's choice

  /// When m is settled, before the blocks begin.
  void make_schedule() {
    schedule = GatherSchedule(plan.gather, context.world);
    shards = Shards(m, context.world.size());
  }
  /// Chunks that this rank sends to other nodes.
  std::uint32_t chunks_sent() const {
    return gather_chunks_sent(schedule,
                              [this](std::uint32_t rank) { return shards.of(rank).count; });
  }
};

template <class Executor>
class AllGatherBlock : public OperatorBlock<Executor> {
 public:
  MK_HOST_DEVICE AllGatherBlock(Executor& executor_in, const AllGatherLaunch& launch_in,
                                Role role_in, std::uint32_t index_in, BlockTotals& totals_in)
      : OperatorBlock<Executor>(executor_in, launch_in, role_in, index_in, totals_in),
        launch(launch_in),
        gather(*this, launch_in.schedule, launch_in.rows.rows, launch_in.in_place) {}
  AllGatherBlock(const AllGatherBlock&) = delete;
  AllGatherBlock& operator=(const AllGatherBlock&) = delete;

  const AllGatherLaunch& launch;
  GatherBlock<Executor> gather;
};

namespace all_gather {

/// Block `index` of the role; whether it ran to its end. If not, the launch has failed; its first
/// cause is in LocalWords::failure.
template <class Executor>
MK_HOST_DEVICE inline bool run_role(AllGatherBlock<Executor>& block) {
  const AllGatherLaunch& launch = block.launch;
  const std::uint32_t collectors = launch.blocks.compute;
  switch (block.role) {
    case Role::kShare:
      return gather::share(block.gather, launch.rows, false, launch.sharing);
    case Role::kSend:
      return gather::send(block.gather, [&block, collectors] {
        return block.await_blocks(Role::kCollect, collectors, kGatherHopsMax + 1);
      });
    case Role::kReceive:
      return gather::receive(block.gather, launch.onward);
    default:
      if (launch.mode == Mode::kUnfused && !block.gather.await_all()) return false;
      return gather::collect(block.gather, launch.rows, launch.all, collectors,
                             launch.collect_parts,
                             [&launch](std::uint32_t rank) { return launch.shards.of(rank); });
  }
}

}  // namespace all_gather
}  // namespace mk::kernels
