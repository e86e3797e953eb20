/// \file
/// The receive role's sums over the nodes, one-shot (roles.h) and two-shot (two_shot.h).
#pragma once

#include <cstdint>

#include "kernels/ops/gemm_ar/block.h"

namespace mk::kernels::gemm_ar {

/// All nodes' sums of the chunk, whose `tiles` this block adds up, are here.
template <class Executor>
MK_HOST_DEVICE inline bool await_node_sums(GemmArBlock<Executor>& block, std::uint32_t chunk,
                                           const TileRange& tiles) {
  const World& world = block.world;
  if (!block.await_chunk_reduced(chunk, tiles)) return false;
  for (std::uint32_t node = 0; node < world.nodes; ++node) {
    if (node == world.node) continue;
    if (!block.await_sum_of(node, chunk)) return false;
    block.span_mark(SpanKind::kArrival, chunk, node, world.rail_peer(node));
  }
  return true;
}

/// The owner's sums over the nodes of the `position`-th step's chunk, or of that part of it, in
/// node order. They go to C of every local rank; two-shot, to where what is finished lies packed.
template <class Executor>
MK_HOST_DEVICE inline bool receive_chunk(GemmArBlock<Executor>& block, std::uint32_t position,
                                         std::uint32_t chunk, Part part) {
  const World& world = block.world;
  const bool two_shot = block.schedule.two_shot();
  const TilesPart mine = block.schedule.chunk_part(world.local, chunk, part);
  if (!await_node_sums(block, chunk, mine.tiles)) return false;
  const std::uint64_t begin_ns = block.span_begin();
  for (std::uint32_t owned = mine.tiles.begin; owned < mine.tiles.end; ++owned) {
    SumJob job = block.job_for(owned);
    block.add_node_sums(job, block.offset_in_bank(owned), block.staging_slot(owned));
    if (two_shot) {
      block.aim_at_finished(job, owned);
    } else {
      block.aim_at_every_c(job, owned);
    }
    if (job.take(mine.rows)) block.executor.sum(job);
  }
  if (block.last_part(position, part)) {
    if (two_shot) {
      block.publish_chunk_finished(chunk);
    } else {
      block.publish_out_ready(chunk);
    }
  }
  block.span_end(begin_ns, SpanKind::kSum, chunk, world.nodes, world.rank());
  return true;
}

}  // namespace mk::kernels::gemm_ar
