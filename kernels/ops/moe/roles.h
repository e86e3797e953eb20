/// \file
/// What the blocks of MoE Dispatch+GEMM do. Flags, counters and commands are here and in
/// gather/roles.h, once for all executors; the executor brings the arithmetic and the bulk copies:
///
///     bool multiply(const RowTile&, uint32_t packed_rows, const TileRect& columns,
///                   const std::byte* packed);
///                          packed rows times the columns of the expert's weights, rounded, into
///                          the tile's rows and columns of the output; what the padding gives is
///                          dropped; false: it cannot, and has noted why
///     and what gather/roles.h and comm/block.h ask for
///
/// One whose blocks have several lanes (routing_plan.h) does the plan's pieces by them:
///
///     void count(const RoutingPlan&, uint32_t part, const RoutingTable&);
///     void arrange(const RoutingPlan&, uint32_t capacity);
///     void fill(const RoutingPlan&, uint32_t part, const RoutingTable&);
///
/// The way of a token, with the flag that hands each step to the next (all hold the epoch; each
/// word has one writer):
///
///     role      does                                              then shows
///     (share, send and receive: the gather of the routing tables, then that of the tokens)
///     plan      routing tables -> offsets, row tiles, rows        done[plan]
///     pull      tokens of a row tile, wherever they lie on the
///               node -> its packed rows                           rows_packed[row tile]
///     compute   packed rows x the expert's weights -> output
///
/// Every rank plans for itself from all routing tables: these are small and come first. Nobody
/// waits for the host or for another rank's plan. Tokens come as they are, once to each node, and
/// each rank takes those that its experts need.
///
/// A rank whose rows do not fit its output says so in its plan's summary, and computes and pulls
/// nothing. It shares, sends and receives as ever, so that no other rank notices. The same where a
/// table has a fault, which all ranks see. (The CPU's executor looks at its own table before.)
///
/// Why nothing is overwritten too early: the gathers' slots by gather/roles.h. What they are read
/// for, here, ends with the last pull block, which began after the last plan block. All else is
/// this rank's own and read within the launch.
#pragma once

#include <cstdint>

#include "kernels/gather/roles.h"
#include "kernels/ops/moe/block.h"

namespace mk::kernels::moe_dispatch {

// Each role answers whether it ran to its end. If not, the launch has failed; its first cause is in
// `launch.local->failure` or with the executor.

/// Hands out this rank's routing, then its tokens, or has engines bring these within the node
/// (gather/engine_steps.h). Only with several ranks.
template <class Executor>
MK_HOST_DEVICE inline bool share(MoeDispatchBlock<Executor>& block) {
  return gather::share(block.routing, block.own_routing()) &&
         gather::share(block.tokens, block.own_tokens(), /*in_turn=*/false,
                       {.by_dma = block.launch.by_dma});
}

/// Sends both round the ring: everybody's routing before anybody's tokens, because no rank can use
/// a token before it has all routing. Only with several nodes.
template <class Executor>
MK_HOST_DEVICE inline bool send(MoeDispatchBlock<Executor>& block) {
  Channel<Executor> channel(block);
  if (!gather::send_first(block.routing, channel) ||
      !gather::send_shards(block.tokens, channel, block.launch.blocks.send))
    return false;
  gather::end_shards(block, channel);
  if (block.index != 0) return true;
  return gather::settle(block.routing, channel) && gather::settle(block.tokens, channel) &&
         (!block.tokens.schedule.awaits_consumers() || block.await_pulled()) &&
         gather::release(block.routing, channel) && gather::release(block.tokens, channel);
}

/// Shows the node what has arrived, or brings it to the node's others. Only with several nodes and
/// several local ranks.
template <class Executor>
MK_HOST_DEVICE inline bool receive(MoeDispatchBlock<Executor>& block) {
  if (!gather::receive_shards(block.routing) || !gather::receive_shards(block.tokens)) return false;
  block.publish_done(block.launch.blocks.receive);
  return true;
}

/// Calls visit(part, table) for the parts `index`, `index` + plan blocks, ... of the routing plan,
/// as their tables arrive.
template <class Executor, class Visit>
MK_HOST_DEVICE inline bool for_own_parts(MoeDispatchBlock<Executor>& block, Visit&& visit) {
  const std::uint32_t parts = block.plan.shape().parts();
  for (std::uint32_t part = block.index; part < parts; part += block.launch.blocks.plan) {
    RoutingTable table;
    if (!block.await_table(block.plan.rank_of(part), &table)) return false;
    visit(part, table);
  }
  return true;
}

template <class Executor>
MK_HOST_DEVICE inline void arrange(MoeDispatchBlock<Executor>& block) {
  if constexpr (requires { block.executor.arrange(block.plan, 0u); }) {
    block.executor.arrange(block.plan, block.launch.capacity);
  } else {
    block.plan.arrange(block.launch.capacity);
  }
}

/// The routing plan; block 0 makes the step that is one block's.
template <class Executor>
MK_HOST_DEVICE inline bool plan(MoeDispatchBlock<Executor>& block) {
  const auto count = [&](std::uint32_t part, const RoutingTable& table) {
    if constexpr (requires { block.executor.count(block.plan, part, table); }) {
      block.executor.count(block.plan, part, table);
    } else {
      block.plan.count(part, table);
    }
  };
  if (!for_own_parts(block, count)) return false;
  block.publish_counted();
  if (block.index == 0) {
    if (!block.await_counted()) return false;
    arrange(block);
    const PlanSummary& summary = block.plan.summary();
    if (summary.fault.any()) {
      RoutingTable table;
      if (!block.await_table(summary.fault.rank, &table)) return false;
      block.plan.complete_fault(table);
    }
    if (summary.fits == 0 && block.launch.refusals != nullptr) block.note_refusal();
    block.publish_arranged();
  } else if (!block.await_arranged()) {
    return false;
  }
  const auto fill = [&](std::uint32_t part, const RoutingTable& table) {
    if constexpr (requires { block.executor.fill(block.plan, part, table); }) {
      block.executor.fill(block.plan, part, table);
    } else {
      block.plan.fill(part, table);
    }
  };
  if (block.plan.summary().fits != 0 && !for_own_parts(block, fill)) return false;
  block.publish_done(block.launch.blocks.plan);
  return true;
}

/// Which rows of which row tile.
struct PackStep {
  std::uint32_t tile = 0;
  Part rows;
};
/// The `step`-th piece of packing, of which `blocks` blocks take turns. In the first turn a tile is
/// packed in `parts` pieces, in the next one in half as many, and so on: whole tiles by all blocks
/// at a time would all be there late. `parts`: a power of two, of `blocks` at most.
MK_HOST_DEVICE constexpr PackStep pack_step(std::uint32_t step, std::uint32_t blocks,
                                            std::uint32_t parts) {
  const std::uint32_t turn = blocks / parts * parts;
  std::uint32_t first = 0;
  for (; parts > 1; parts /= 2) {
    if (step < turn) return {first + step / parts, {step % parts, parts}};
    step -= turn;
    first += turn / parts;
  }
  return {first + step, {}};
}

/// In how many pieces the first row tiles are packed: one, or what the executor says by
///     static uint32_t pack_parts(const MoeDispatchBlock&);
template <class Executor>
MK_HOST_DEVICE inline std::uint32_t pack_parts(const MoeDispatchBlock<Executor>& block) {
  if constexpr (requires { Executor::pack_parts(block); }) {
    return Executor::pack_parts(block);
  } else {
    return 1;
  }
}

/// Packs its pieces of row tiles, which come in the order in which they are computed.
template <class Executor>
MK_HOST_DEVICE inline bool pull(MoeDispatchBlock<Executor>& block) {
  if (!block.await_plan()) return false;
  const std::uint32_t token_bytes = block.schedule.token_bytes();
  const std::uint32_t blocks = block.launch.blocks.pull;
  const std::uint32_t parts = pack_parts(block);
  for (std::uint32_t step = block.index;; step += blocks) {
    const PackStep piece = pack_step(step, blocks, parts);
    if (piece.tile >= block.row_tiles()) break;
    const RowTile& tile = block.plan.tiles()[piece.tile];
    const std::uint64_t begin = block.span_begin();
    const TileRange rows = run_of(piece.rows.index, piece.rows.count, tile.rows);
    CopyJob job;
    job.target_count = 1;
    job.targets[0] = block.packed(tile) + std::uint64_t{token_bytes} * rows.begin;
    job.rows = 1;
    job.row_bytes = token_bytes;
    for (std::uint32_t row = tile.row + rows.begin; row < tile.row + rows.end; ++row) {
      job.source = block.await_token(block.plan.rows()[row]);
      if (job.source == nullptr) return false;
      block.executor.copy(job);
      job.targets[0] += token_bytes;
    }
    if (block.last_part(piece.tile, piece.rows)) block.publish_packed(piece.tile);
    block.span_end(begin, SpanKind::kCopy, piece.tile, block.schedule.tokens().node_at(tile.hops),
                   block.last_source(tile));
  }
  block.publish_done(block.launch.blocks.pull);
  return true;
}

/// What a compute block waits for before its first tile, besides that tile's rows.
template <class Executor>
MK_HOST_DEVICE inline bool await_tiles(MoeDispatchBlock<Executor>& block) {
  return block.await_plan() && (block.launch.mode != Mode::kUnfused || block.await_pulled());
}

/// Computes tiles `index`, `index` + compute blocks, ... of this rank's order; or, where the
/// executor has them taken (gather/steps.h), after the first the next that no block has.
template <class Executor>
MK_HOST_DEVICE inline bool compute(MoeDispatchBlock<Executor>& block) {
  if (!await_tiles(block)) return false;
  const std::uint64_t steps = block.schedule.steps(block.row_tiles());
  for (std::uint32_t step = block.index; step < steps;
       step = gather::next_step(block, step, block.launch.blocks.compute, /*taken=*/true)) {
    const std::uint32_t row_tile = block.schedule.row_tile_at(step);
    if (block.stopped() || !block.await_packed(row_tile)) return false;
    const std::uint64_t begin = block.span_begin();
    const RowTile& tile = block.plan.tiles()[row_tile];
    if (!block.executor.multiply(tile, block.plan.packed_rows(tile),
                                 block.schedule.columns_at(step), block.packed(tile))) {
      block.stop();
      return false;
    }
    block.span_end(begin, SpanKind::kTile, step, 0, block.last_source(tile));
  }
  block.publish_done(block.launch.blocks.compute);
  return true;
}

}  // namespace mk::kernels::moe_dispatch
