/// \file
/// What the blocks of GEMM+ReduceScatter do. Flags, counters and commands are here, once for all
/// executors; the executor brings the arithmetic and knows the caller's C:
///
///     bool multiply(const TileRect&, void* target, uint64_t target_stride);
///                                    this rank's partial of the tile (its place in the whole C),
///                                    in the type of partials; of one rank alone the result;
///                                    false: it cannot, and has noted why
///     void accumulate(const AccumulateJob&);   where it adds to its own tiles
///     void sum(const SumJob&);       comm/sum_job.h
///     void* c_at(const TileRect&);   the tile's place in the caller's C; its rows are from the
///                                    first row of this rank's shard on
///     uint64_t c_stride();
///     and what comm/block.h asks for
///
/// Strides are in elements. The way of a tile, with the flag that hands each step to the next (all
/// hold the epoch; each word has one writer):
///
///     role     on           does                                      then shows
///     compute  every rank   tile -> slot at its owner on this node tile_ready[source][node][tile]
///     reduce   owner        slots -> sum over local ranks -> staging;
///                           of its own shard: kept                    chunk_reduced[node][chunk]
///     send     owner        staging -> receive bank of the rail peer  arrival[bank][from][chunk]
///     receive  owner        kept (or slots, GemmRsLaunch::sums_once)
///                           and receive banks -> sum over nodes
///                           -> the caller's C
///
/// Sums go in rank order within a node. Over nodes the owner's own comes first, then the others' in
/// node order, or all are in node order (GemmRsLaunch::in_node_order). So every run gives the same
/// bits. With one node, reduce stores into C itself. There
/// is no send and no receive (where one of two ranks sums its own tiles as it computes them,
/// GemmRsLaunch::accumulates_own, compute does that, and nobody reduces). With one local rank,
/// compute stores into staging, or keeps, itself; there is no reduce. With both, compute stores
/// into C.
///
/// Why nobody waits in a circle where a shard is summed once: a rank's tiles and its sums for other
/// nodes wait for nothing that comes over the network. A worker with several roles does those
/// first.
///
/// Why nothing is overwritten too early (e: this launch; with two banks, b = 2):
///  - Slots: a rank writes the first tile of e at an owner after that owner has ended e - 1, in
///    which it read its slots (WorkspaceHead::finished).
///  - Kept: written and read in one launch by one rank.
///  - Staging bank: written in e after the daemon has read what e - b sent from it
///    (LocalWords::sent_in).
///  - Receive bank: written in e after its reader has ended e - b, or released it (comm/banks.h).
///  - Launch records: announce_launch.
#pragma once

#include <cstdint>

#include "kernels/comm/compute_role.h"
#include "kernels/comm/exchange.h"
#include "kernels/ops/gemm_rs/block.h"
#include "kernels/ops/gemm_rs/protocol.h"

namespace mk::kernels::gemm_rs {

// Each role answers whether it ran to its end. If not, the launch has failed; its first cause is in
// `launch.local->failure` or with the executor.

/// The sum over the local ranks of a tile of this owner's shard of `node`, or of those of its rows;
/// when all partials are there.
template <class Executor>
MK_HOST_DEVICE inline bool sum_tile(GemmRsBlock<Executor>& block, std::uint32_t node,
                                    std::uint32_t tile, Part rows) {
  const World& world = block.world;
  const PackedTiles packed = block.schedule.packed(world.rail_peer(node));
  // Before the wait, as a leader's thread takes a microsecond or two for it.
  SumJob job = block.job_for(node, tile, world.nodes == 1);
  block.add_partials(job, node, packed.offset(tile));
  const bool has_rows = job.take(rows);
  if (!block.await_tile(node, tile)) return false;
  const std::uint64_t begin_ns = block.span_begin();
  if (has_rows) block.executor.sum(job);
  block.span_end(begin_ns, SpanKind::kSum, packed.chunk_of(tile), node, world.rank());
  return true;
}

/// Computes this rank's tiles and, where it accumulates its own (GemmRsLaunch::accumulates_own),
/// adds the other rank's partials to those.
template <class Executor>
MK_HOST_DEVICE inline bool compute(GemmRsBlock<Executor>& block) {
  return compute_tiles<GemmRsCompute>(block);
}

/// The owner's local sums of its `index`-th piece, or of that part of it.
template <class Executor>
MK_HOST_DEVICE inline bool reduce_piece(GemmRsBlock<Executor>& block, std::uint32_t index,
                                        Part part = {}) {
  const World& world = block.world;
  const GemmRsSchedule::Piece piece = block.schedule.piece_at(world.node, world.local, index);
  const PackedTiles packed = block.schedule.packed(world.rail_peer(piece.node));
  const TilesPart mine = packed.chunk_part(piece.chunk, part);
  for (std::uint32_t tile = mine.tiles.begin; tile < mine.tiles.end; ++tile) {
    if (!sum_tile(block, piece.node, tile, mine.rows)) return false;
  }
  if (world.nodes > 1 && block.last_part(index, part)) block.publish_chunk_reduced(piece);
  return true;
}

/// What a block awaits before its first reduce_piece of a launch.
/// (An executor may let some of a rank's blocks check the local ranks' launches for all: when one
/// launched with another m, that stops them all.)
template <class Executor>
MK_HOST_DEVICE inline bool begin_reduce(GemmRsBlock<Executor>& block, bool checks = true) {
  if (!block.await_turn() || (checks && !block.check_local_records())) return false;
  return block.world.nodes == 1 || block.await_staging_free();
}

/// The owner's local sums, pieces `index`, `index` + reduce blocks, ..., or, of `parts` parts of
/// each piece, so many of those. Only with several local ranks. (An executor may deal them out in
/// another way, in their order.)
template <class Executor>
MK_HOST_DEVICE inline bool reduce(GemmRsBlock<Executor>& block, std::uint32_t parts = 1) {
  if (!begin_reduce(block)) return false;
  if (block.launch.accumulates_own_tiles()) return true;
  return deal_parts(
      block.launch.pieces_reduced(), parts, block.index, block.launch.blocks.reduce,
      [&](std::uint32_t piece, Part part) { return reduce_piece(block, piece, part); });
}

/// The send role's pieces: each as soon as it is reduced, to the rail peer on its node.
template <class Executor>
MK_HOST_DEVICE inline bool send_pieces(GemmRsBlock<Executor>& block, Channel<Executor>& channel) {
  const GemmRsSchedule& schedule = block.schedule;
  const World& world = block.world;
  const FlagMap flags = schedule.flags();
  const std::uint32_t step = block.launch.blocks.send;
  std::uint32_t first = block.index;  // of the node's chunks, or of those after it
  for (std::uint32_t position = 0; position + 1 < world.nodes; ++position) {
    const std::uint32_t node = schedule.node_after(world.node, position);
    const PackedTiles packed = schedule.packed(world.rail_peer(node));
    const ChunkRun run = ChunkRun::below(packed.chunks(), first, step);
    const Route route{node, schedule.staging_bank(block.bank, world.node, node),
                      schedule.receive_bank(block.bank, node, world.node),
                      flags.arrival(block.bank, node, world.node, 0)};
    // Else the worker that stored a tile there has seen the bank free.
    if (packed.tiles() == 0 && !block.await_staging_free()) return false;
    const bool sent = channel.send_when_ready(
        {run, 1, packed.chunk_bytes(), world.node, &flags},
        [&](std::uint32_t /*peer*/) { return route; },
        [&](std::uint32_t chunk) { return packed.chunk_range(chunk); },
        [&](std::uint32_t chunk, std::uint32_t count) {
          const std::uint32_t ready = block.await_pieces({node, chunk}, packed, count, step);
          // The header is this role's own.
          if (chunk == 0 && ready != 0) block.write_header(route.source);
          return ready;
        });
    if (!sent) return false;
    first = run.end() - packed.chunks();
  }
  channel.note_sent();
  return true;
}

/// The owner's way to the network, pieces `index`, `index` + send blocks, ..., through ring
/// `index`. Only with several nodes.
template <class Executor>
MK_HOST_DEVICE inline bool send(GemmRsBlock<Executor>& block) {
  if (!block.await_turn()) return false;
  Channel<Executor> channel(block);
  const auto chunks = [&](std::uint32_t node) {
    return block.schedule.packed(block.world.rail_peer(node)).chunks();
  };
  const auto own_chunks = [&](std::uint32_t) { return chunks(block.world.node); };
  return send_pieces(block, channel) &&
         (block.index != 0 ||
          end_exchange(block, channel, block.schedule.flags(), chunks, own_chunks));
}

/// The owner's sums over the nodes of one chunk of its shard, or of that part of it.
template <class Executor>
MK_HOST_DEVICE inline bool receive_chunk(GemmRsBlock<Executor>& block, std::uint32_t chunk,
                                         Part part = {}) {
  const World& world = block.world;
  const PackedTiles packed = block.schedule.packed(world.rank());
  const TilesPart mine = packed.chunk_part(chunk, part);
  const bool once = block.launch.sums_shard_once();
  if (!once && !block.await_piece({world.node, chunk}, mine.tiles)) return false;
  for (std::uint32_t node = 0; node < world.nodes; ++node) {
    if (node == world.node) continue;
    if (!block.await_arrival(node, chunk, chunk)) return false;
    block.span_mark(SpanKind::kArrival, chunk, node, world.rail_peer(node));
  }
  for (std::uint32_t tile = mine.tiles.begin; tile < mine.tiles.end; ++tile) {
    SumJob job = block.job_for(world.node, tile, true);
    if (once) {
      block.add_partials(job, world.node, packed.offset(tile));
      if (job.source_type == Partials::kElement) job.rounded_sources = world.locals;
    } else if (!block.launch.in_node_order) {
      job.add_source(block.sums_for(world.node) + packed.offset(tile));
    }
    const std::byte* const own = block.sums_for(world.node) + packed.offset(tile);
    block.add_node_sums(job, kBankHeaderBytes + packed.offset(tile),
                        block.launch.in_node_order ? own : nullptr);
    const bool has_rows = job.take(mine.rows);
    if (once && !block.await_tile(world.node, tile)) return false;
    const std::uint64_t begin_ns = block.span_begin();
    if (has_rows) block.executor.sum(job);
    block.span_end(begin_ns, SpanKind::kSum, chunk, world.nodes, world.rank());
  }
  return true;
}

/// The owner's sums over the nodes, chunks `index`, `index` + receive blocks, ... of its shard, or,
/// of `parts` parts of each chunk, so many of those. Only with several nodes. (An executor may deal
/// them out in another way, in their order; all blocks that take part are done in the end.)
template <class Executor>
MK_HOST_DEVICE inline bool receive(GemmRsBlock<Executor>& block, std::uint32_t parts = 1) {
  if (!block.await_turn()) return false;
  const bool received =
      deal_parts(block.schedule.packed(block.world.rank()).chunks(), parts, block.index,
                 block.launch.blocks.receive,
                 [&](std::uint32_t chunk, Part part) { return receive_chunk(block, chunk, part); });
  if (!received) return false;
  // Also with no chunk of its own: send block 0 waits for all receive blocks.
  block.publish_done(block.launch.blocks.receive);
  return true;
}

}  // namespace mk::kernels::gemm_rs
