/// \file
/// What the blocks of AllGather+GEMM do, besides those of the gather (gather/roles.h). The
/// executor brings the arithmetic and the bulk copies:
///
///     bool multiply(const AgGemmTile&, const std::byte* rows, uint64_t stride_bytes);
///                                    the tile of C from these rows of A and this rank's B, rounded
///                                    to the element type; false: it cannot, and has noted why
///     and what gather/roles.h asks for
///
///     role     does                                             waits for
///     share    this rank's shard -> its node, its send blocks
///     send     the shards of its rail -> next node              what it sends
///     receive  arrived shards -> its node                       arrivals
///     compute  tiles of C, by expected arrival of their rows    the rows of each
///     collect  the whole A -> the caller's, if wanted           all rows
///
/// Slots are read until collect is done. Nothing else of a launch outlives it: C and the gathered A
/// are the caller's.
#pragma once

#include <cstdint>

#include "kernels/gather/collect.h"
#include "kernels/gather/roles.h"
#include "kernels/ops/ag_gemm/block.h"
#include "kernels/ops/ag_gemm/protocol.h"

namespace mk::kernels::ag_gemm {

// Each role answers whether it ran to its end. If not, the launch has failed; its first cause is in
// LocalWords::failure or with the executor.

/// Computes tiles `index`, `index` + compute blocks, ... of this rank's order.
template <class Executor>
inline bool compute(AgGemmBlock<Executor>& block) {
  using Scheduler = AgGemmTileScheduler<AgGemmEvenSteps, AgGemmEvenSteps::Params>;
  using InputBarrier = AgGemmInputBarrier<AgGemmBlock<Executor>>;
  const auto barrier_params = InputBarrier::Params::of(block.launch);
  const Scheduler::Params scheduler_params{barrier_params.order};
  Scheduler scheduler(scheduler_params, static_cast<int>(block.index),
                      static_cast<int>(block.launch.blocks.compute));
  InputBarrier barrier(barrier_params, block);
  for (Tile next; scheduler.next(&next);) {
    if (block.stopped()) return false;
    const AgGemmTile tile = scheduler_params.order.tiles.find(next);
    barrier.await_rows(tile);
    if (barrier.failed()) return false;
    const std::uint64_t begin_ns = block.span_begin();
    const auto multiply = [&block](const AgGemmTile& part) {
      std::uint64_t stride_bytes = 0;
      const std::byte* const rows = block.rows_of(part, &stride_bytes);
      return block.executor.multiply(part, rows, stride_bytes);
    };
    bool made = true;
    if (!block.schedule.spans()) made = multiply(tile);
    for (std::uint32_t rank = 0; block.schedule.spans() && rank < block.world.size(); ++rank)
      made = made && multiply(block.schedule.part_of(tile, rank));
    if (!made) {
      block.stop();
      return false;
    }
    block.span_end(begin_ns, SpanKind::kTile, tile.rect.row, tile.rect.column, tile.origin);
  }
  return true;
}

/// Sees that all ranks take part with the same m, also those whose shard is empty, and brings the
/// whole A to the caller where it is wanted. Every compute block does it after its tiles.
template <class Executor>
MK_HOST_DEVICE inline bool collect(AgGemmBlock<Executor>& block) {
  const AgGemmLaunch& launch = block.launch;
  return gather::collect(block.gather, launch.shard, launch.gathered, launch.blocks.compute,
                         launch.collect_parts,
                         [&block](std::uint32_t origin) { return block.schedule.shard(origin); });
}

/// The first half of `collect`, of all ranks: what is left of it where nobody wants the whole A and
/// no bank is released. (An executor may let one block do that, whichever.)
template <class Executor>
MK_HOST_DEVICE inline bool await_headers(AgGemmBlock<Executor>& block) {
  for (std::uint32_t origin = 0; origin < block.world.size(); ++origin) {
    if (!block.gather.await_header(origin)) return false;
  }
  return true;
}

template <class Executor>
MK_HOST_DEVICE inline bool share(AgGemmBlock<Executor>& block) {
  const AgGemmLaunch& launch = block.launch;
  return gather::share(block.gather, launch.shard, launch.arrival == Arrival::kSoonInTurn,
                       launch.sharing);
}
template <class Executor>
MK_HOST_DEVICE inline bool send(AgGemmBlock<Executor>& block) {
  return gather::send(block.gather, [&block] {
    return block.await_blocks(Role::kCollect, block.launch.blocks.compute, kGatherHopsMax + 1);
  });
}
template <class Executor>
MK_HOST_DEVICE inline bool receive(AgGemmBlock<Executor>& block) {
  return gather::receive(block.gather, block.launch.onward);
}

}  // namespace mk::kernels::ag_gemm
