/// \file
/// What the blocks of GEMM+AllReduce do. Flags, counters and commands are here, once for all
/// executors; the executor brings the arithmetic and the bulk copies:
///
///     bool multiply(const TileRect&, void* target, uint64_t target_stride);
///                                    this rank's partial of the tile, in the type of partials; of
///                                    one rank alone the result; false: it cannot, and has noted
///                                    why
///     void sum(const SumJob&);       comm/sum_job.h
///     bool wants_c();                whether copy_to_c is to be called
///     void copy_to_c(const TileRect&, const void* source, uint64_t source_stride);
///     and what comm/block.h asks for
///
/// Strides are in elements. The way of a tile, with the flag that hands each step to the next (all
/// hold the epoch; each word has one writer):
///
///     role     on           does                                       then shows
///     compute  every rank   tile -> slot at its owner                  tile_ready[source][tile]
///     reduce   owner        slots -> sum over local ranks -> staging   chunk_reduced[chunk]
///     send     owner        staging -> receive banks of rail peers     arrival[bank][from][chunk]
///     receive  owner        staging and receive banks -> sum over
///                           nodes -> C of every local rank             out_ready[owner][chunk]
///     collect  every rank   C, as it arrives -> the caller's C
///
/// Two-shot (schedule.h), send and receive have two steps each (two_shot.h).
///
/// Sums go in rank order and in node order, so every run gives the same bits, on every rank. With
/// one node, reduce stores into C itself. There is no send and no receive (where a rank sums its
/// own tiles as it computes them, GemmArLaunch::accumulates_own, compute does that, and nobody
/// reduces). With one local rank, compute stores into staging itself; there is no reduce. With
/// both, compute stores into C.
///
/// Why nothing is overwritten too early (e: this launch; with two banks, b = 2):
///  - Slots and C: launch e ends on a rank when all of C is there, so after every owner has read
///    all its slots. Slots are written in e + 1, by ranks that have ended e. A rank's C is written
///    by others in e + 1 only after this rank's own tiles of e + 1 went in. When a wait for those
///    has failed, it is not written at all.
///  - Staging bank: written in e after the daemon has read what e - b sent from it
///    (LocalWords::sent_in).
///  - Receive bank: written in e after its reader has ended e - b, or released it (comm/banks.h).
///  - Launch records: those of e + 2 take the place of those of e. A rank writes them after all
///    local ranks have ended e (`finished`).
#pragma once

#include <cstdint>

#include "kernels/comm/compute_role.h"
#include "kernels/comm/exchange.h"
#include "kernels/ops/gemm_ar/block.h"
#include "kernels/ops/gemm_ar/node_sums.h"
#include "kernels/ops/gemm_ar/protocol.h"
#include "kernels/ops/gemm_ar/two_shot.h"

namespace mk::kernels::gemm_ar {

// Each role answers whether it ran to its end. If not, the launch has failed; its first cause is in
// `launch.local->failure` or with the executor.

/// The owner's sum over the local ranks of a tile, or of those of its rows, into staging, or C of
/// every local rank; when all partials are there.
template <class Executor>
MK_HOST_DEVICE inline bool sum_tile(GemmArBlock<Executor>& block, std::uint32_t owned, Part rows) {
  const GemmArSchedule& schedule = block.schedule;
  const World& world = block.world;
  // Before the wait, as a leader's thread takes a microsecond or two for it.
  SumJob job = block.job_for(owned);
  job.source_count = world.locals;
  for (std::uint32_t source = 0; source < world.locals; ++source) {
    job.sources[source] = block.at(schedule.slot(source, owned));
  }
  if (world.nodes > 1) {
    block.aim_at_staging(job, owned);
  } else {
    block.aim_at_every_c(job, owned);
  }
  const bool has_rows = job.take(rows);
  if (!block.await_tile(owned)) return false;
  const std::uint64_t begin_ns = block.span_begin();
  if (has_rows) block.executor.sum(job);
  block.span_end(begin_ns, SpanKind::kSum, schedule.chunk_of(world.local, owned), world.node,
                 world.rank());
  return true;
}

/// Computes this rank's tiles and, where it accumulates its own (GemmArLaunch::accumulates_own),
/// adds the other rank's partials to those.
template <class Executor>
inline bool compute(GemmArBlock<Executor>& block) {
  return compute_tiles<GemmArCompute>(block);
}

/// The owner's local sums of the chunk that comes `position`-th, or of that part of it.
template <class Executor>
MK_HOST_DEVICE inline bool reduce_chunk(GemmArBlock<Executor>& block, std::uint32_t position,
                                        Part part = {}) {
  const World& world = block.world;
  const std::uint32_t chunk = block.schedule.chunk_at(world.node, world.local, position);
  const TilesPart mine = block.schedule.chunk_part(world.local, chunk, part);
  for (std::uint32_t owned = mine.tiles.begin; owned < mine.tiles.end; ++owned) {
    if (!sum_tile(block, owned, mine.rows)) return false;
  }
  if (!block.last_part(chunk, part)) return true;
  if (world.nodes > 1) {
    block.publish_chunk_reduced(chunk);
  } else {
    block.publish_out_ready(chunk);
  }
  return true;
}

/// What a block awaits before its first reduce_chunk of a launch.
/// (An executor may let some of a rank's blocks check the local ranks' launches for all: when one
/// launched with another m, that stops them all.)
template <class Executor>
MK_HOST_DEVICE inline bool begin_reduce(GemmArBlock<Executor>& block, bool checks = true) {
  if (!block.await_turn() || (checks && !block.check_local_records())) return false;
  return block.world.nodes == 1 || block.await_staging_free();
}

/// The owner's local sums, positions `index`, `index` + reduce blocks, ..., or, of `parts` parts of
/// each chunk, so many of those. Only with several local ranks. (An executor may deal them out in
/// another way, in their order.)
template <class Executor>
MK_HOST_DEVICE inline bool reduce(GemmArBlock<Executor>& block, std::uint32_t parts = 1) {
  if (!begin_reduce(block)) return false;
  if (block.launch.accumulates_own_tiles()) return true;
  return deal_parts(
      block.schedule.chunks(block.world.local), parts, block.index, block.launch.blocks.reduce,
      [&](std::uint32_t position, Part part) { return reduce_chunk(block, position, part); });
}

/// The send role's chunks: each as soon as it is reduced, to every rail peer. One-shot.
template <class Executor>
MK_HOST_DEVICE inline bool send_chunks(GemmArBlock<Executor>& block, Channel<Executor>& channel) {
  const GemmArSchedule& schedule = block.schedule;
  const World& world = block.world;
  const std::uint64_t staging = schedule.staging_bank(block.bank);
  const PackedTiles packed = schedule.packed(world.local);
  const FlagMap flags = schedule.flags();
  const std::uint32_t step = block.launch.blocks.send;
  const ChunkRun run = ChunkRun::below(packed.chunks(), block.index, step);
  // Else the worker that stored a tile there has seen the bank free.
  if (run.count != 0 && packed.tiles() == 0 && !block.await_staging_free()) return false;
  // Each chunk goes to the next node first, so that no link is everybody's first.
  const auto route_to = [&](std::uint32_t peer) {
    const std::uint32_t after = world.node + 1 + peer;
    const std::uint32_t node = after < world.nodes ? after : after - world.nodes;
    return Route{node, staging, schedule.receive_bank(block.bank, node, world.node),
                 flags.arrival(block.bank, node, world.node, 0)};
  };
  bool header_due = block.index == 0;
  const bool sent = channel.send_when_ready(
      {run, world.nodes - 1, packed.chunk_bytes(), world.node, &flags}, route_to,
      [&](std::uint32_t chunk) { return packed.chunk_range(chunk); },
      [&](std::uint32_t chunk, std::uint32_t count) {
        const std::uint32_t ready = block.await_chunks_reduced(chunk, count, step);
        // The header is this role's own, and goes with the first chunk.
        if (header_due && ready != 0) block.write_header(staging);
        header_due = false;
        return ready;
      });
  if (sent) channel.note_sent();
  return sent;
}

/// The owner's way to the network, chunks `index`, `index` + send blocks, ..., through ring
/// `index`. Only with several nodes.
template <class Executor>
MK_HOST_DEVICE inline bool send(GemmArBlock<Executor>& block) {
  if (!block.await_turn()) return false;
  Channel<Executor> channel(block);
  const GemmArSchedule& schedule = block.schedule;
  const World& world = block.world;
  const auto sent = [&](std::uint32_t node) {
    return schedule.flags_shown(world.local, node, world.node);
  };
  const auto received = [&](std::uint32_t node) {
    return schedule.flags_shown(world.local, world.node, node);
  };
  return (schedule.two_shot() ? send_two_shot(block, channel) : send_chunks(block, channel)) &&
         (block.index != 0 || end_exchange(block, channel, schedule.flags(), sent, received));
}

/// A block awaits this before its first receive_step of a launch.
template <class Executor>
MK_HOST_DEVICE inline bool begin_receive(GemmArBlock<Executor>& block) {
  return block.await_turn() && (!block.schedule.two_shot() || block.await_staging_free());
}

/// The receive role's `position`-th step, or that part of it.
template <class Executor>
MK_HOST_DEVICE inline bool receive_step(GemmArBlock<Executor>& block, std::uint32_t position,
                                        Part part = {}) {
  return block.schedule.two_shot() ? receive_two_shot(block, position, part)
                                   : receive_chunk(block, position, position, part);
}

/// The owner's sums over the nodes, steps `index`, `index` + receive blocks, ..., or, of `parts`
/// parts of each step, so many of those. Only with several nodes. (An executor may deal them out
/// in another way, in their order; all blocks that take part are done in the end.)
template <class Executor>
MK_HOST_DEVICE inline bool receive(GemmArBlock<Executor>& block, std::uint32_t parts = 1) {
  if (!begin_receive(block)) return false;
  const bool received = deal_parts(
      block.schedule.receive_steps(block.world.local), parts, block.index,
      block.launch.blocks.receive,
      [&](std::uint32_t position, Part part) { return receive_step(block, position, part); });
  if (!received) return false;
  // Also with no chunk of its own: send block 0 waits for all receive blocks.
  block.publish_done(block.launch.blocks.receive);
  return true;
}

/// Sees this rank's C become complete, and copies it to the caller's. `collectors` workers do it
/// after their tiles, each for every `collectors`-th chunk.
template <class Executor>
MK_HOST_DEVICE inline bool collect(GemmArBlock<Executor>& block, std::uint32_t collectors,
                                   bool checks = true) {
  const GemmArSchedule& schedule = block.schedule;
  const World& world = block.world;
  if (checks && world.locals > 1 && !block.check_local_records()) return false;
  // Owner 0 has at least as many chunks as any other. Each turn's chunk is computed, not counted up
  // to: there may be thousands, and on a GPU one thread does this.
  const std::uint32_t turns = schedule.chunks(0) * world.locals;
  for (std::uint32_t turn = block.index; turn < turns; turn += collectors) {
    const std::uint32_t chunk = turn / world.locals;
    const std::uint32_t owner = (turn % world.locals + world.local) % world.locals;
    if (chunk >= schedule.chunks(owner)) continue;
    // Two-shot, the last round may have less than a tile for each node.
    const TileRange tiles = schedule.chunk_tiles(owner, chunk);
    if (schedule.two_shot() && tiles.begin == tiles.end) continue;
    if (!block.await_out(owner, chunk)) return false;
    if (!block.executor.wants_c()) continue;
    for (std::uint32_t owned = tiles.begin; owned < tiles.end; ++owned) {
      const TileRect rect = schedule.rect(schedule.tile_of(owner, owned));
      block.executor.copy_to_c(schedule.result(rect), block.at(schedule.out(rect)),
                               block.launch.plan.result_columns());
    }
  }
  return true;
}

}  // namespace mk::kernels::gemm_ar
