/// \file
/// A block of AllGather+GEMM: a gather, and which tiles it makes possible. The roles are in
/// roles.h.
#pragma once

#include <cstdint>

#include "kernels/comm/operator_block.h"
#include "kernels/gather/block.h"
#include "kernels/ops/ag_gemm/launch.h"
#include "kernels/ops/ag_gemm/schedule.h"

namespace mk::kernels {

template <class Executor>
class AgGemmBlock : public OperatorBlock<Executor> {
 public:
  using Base = OperatorBlock<Executor>;

  MK_HOST_DEVICE AgGemmBlock(Executor& executor_in, const AgGemmLaunch& launch_in, Role role_in,
                             std::uint32_t index_in, BlockTotals& totals_in)
      : Base(executor_in, launch_in, role_in, index_in, totals_in),
        launch(launch_in),
        schedule(launch_in.schedule),
        gather(*this, schedule.gather(), launch_in.shard.rows, launch_in.in_place) {}
  AgGemmBlock(const AgGemmBlock&) = delete;
  AgGemmBlock& operator=(const AgGemmBlock&) = delete;

  const AgGemmLaunch& launch;
  const AgGemmSchedule& schedule;
  GatherBlock<Executor> gather;

  /// The tile's rows of A. `stride_bytes`: from row to row.
  MK_HOST_DEVICE const std::byte* rows_of(const AgGemmTile& tile,
                                          std::uint64_t* stride_bytes) const {
    const RowPiece& own = launch.shard.pieces[0];
    const bool mine = tile.origin == this->world.rank();
    *stride_bytes = mine ? own.stride : launch.plan.gather.row_bytes;
    return (mine ? own.base : gather.rows(tile.origin)) + tile.row * *stride_bytes;
  }
};

}  // namespace mk::kernels
