/// \file
/// What the blocks of GEMM+Combine do, and what waits for what. Flags, entries and commands are
/// here, once for all executors; the executor brings the arithmetic:
///
///     bool multiply(const CombineTile&, uint32_t padded_rows, const TileRect& columns,
///                   std::byte* place_of(uint32_t i));
///                          the tile's rows times the columns of the expert's weights, row i of
///                          them times its weight, as a partial at place_of(i), unless that is
///                          null; false: it cannot, and has noted why
///     void sum(const CombineSum&, before, rows, after);
///                          adds up what before(visit), rows(visit) and after(visit) name; the rows
///                          first for themselves. Or, where several threads do that,
///     void sum_run(const CombineBlock&, const CombineRun&);
///                          the same for each token of the run
///     bool last_part(Role, uint32_t chunk, uint32_t parts);      comm/block.h
///     and what else comm/block.h asks for
///
/// One whose blocks have several lanes (routing_plan.h: OneLane) does the pieces of the index by
/// them. One may have its blocks take steps as they are free:
///
///     void do_piece(const CombineBlock&, CombinePiece);          calls gemm_combine::do_piece
///     uint32_t take_step(Role);                                  gather/steps.h
///
/// The way of a product row, with the flag that hands each step to the next. All flags hold the
/// epoch, and each has one writer. The **owner** of a row is the local rank, on the node where the
/// row is made, that has the rail of the token's rank:
///
///     role     on            does                                     then shows
///     plan     every rank    its rows -> entries at their owners;
///                            its ids -> checks, sums that will come   counted[plan]
///              (block 0)     notes to the owners; order of its tiles  indexed[source] at each
///                                                                     owner
///              owner         entries -> how many tokens of each part
///                            it has rows of                           listed[plan]
///                            which these are; the order of its own    done[plan]
///     compute  every rank    rows x weights -> slots at the owners    tile_ready[source][row tile]
///     reduce   owner         slots -> a token's sum -> staging        chunk_reduced[node][chunk]
///     send     owner         staging -> receive bank of the rail peer arrival[bank][from][chunk]
///     receive  token's rank  slots and receive banks -> its output
///
/// There is no reduce and no send with one node. A token's sum goes in slot order within a node.
/// The nodes' sums go in node order, this node's own in its place; then comes the residual. So
/// every run gives the same bits.
///
/// Why nothing waits in a circle: entries wait for the last launch only. Compute waits for its own
/// rank's entries, sums for the node's entries and products, what arrives for the sums of its
/// sender. None of them waits for a later one.
///
/// Why nothing is overwritten too early (e: this launch; with two banks, b = 2):
///  - Entries, notes, slots: written after all local ranks have ended e - 1
///  (WorkspaceHead::finished).
///    A rank's launch ends after it has seen every row that has a slot with it.
///  - Staging bank: written after the daemon has read what e - b sent from it
///  (LocalWords::sent_in).
///  - Receive bank: written after its reader has ended e - b, or released it (comm/banks.h): every
///    rank hears, in every launch, of every rail peer, if only by a header. A launch ends after
///    every chunk has arrived.
///  - All else is this rank's own and lasts for one launch.
///
/// Handles and ids that make no sense (CombineFault): a row that is nobody's is computed and goes
/// nowhere, an id that is no expert's counts as none. The rank says so in its notes, or to itself,
/// and all goes on as below.
///
/// Handles that do not fit: every rank sees from notes and headers whether each rank's rows are
/// those of its tokens (row_index.h), before it stores anything. If not, it says whose rows do not
/// fit, stores nothing, and does its part to the end: all ranks can launch again.
#pragma once

#include <cstdint>

#include "kernels/comm/exchange.h"
#include "kernels/ops/combine/index.h"

namespace mk::kernels::gemm_combine {

// Each role answers whether it ran to its end. If not, the launch has failed; its first cause is in
// `launch.local->failure` or with the executor.

/// Column tiles `index`, `index` + compute blocks, ... of this rank's row tiles in their order.
template <class Executor>
MK_HOST_DEVICE inline bool compute(CombineBlock<Executor>& block) {
  if (!block.await_indexed(block.world.local)) return false;
  const std::uint32_t columns = block.schedule.column_tiles();
  return deal_parts(block.words->tiles, columns, block.index, block.launch.blocks.compute,
                    [&](std::uint32_t turn, Part part) {
                      if (block.stopped()) return false;
                      const std::uint64_t begin_ns = block.span_begin();
                      const std::uint32_t number = block.order()[turn];
                      const CombineTile& tile = block.tiles()[number];
                      const TileRect rect = block.schedule.columns_at(part.index);
                      const std::uint64_t offset =
                          std::uint64_t{rect.column} * block.launch.plan.partial_bytes();
                      const auto place_of = [&](std::uint32_t i) -> std::byte* {
                        const MoeRow& row = block.rows.row(tile.row + i);
                        return block.rows.is_possible(row) ? block.slot_of(row) + offset : nullptr;
                      };
                      if (!block.executor.multiply(tile, block.schedule.padded_rows(tile), rect,
                                                   place_of)) {
                        block.stop();
                        return false;
                      }
                      if (block.last_part(number, part)) block.publish_tile(number);
                      block.span_end(begin_ns, SpanKind::kTile, number, part.index,
                                     block.rows.row(tile.row).rank);
                      return true;
                    }) &&
         (block.publish_done(block.launch.blocks.compute), true);
}

/// Tokens that are summed at a time: 8, or Executor::kTokensAtOnce.
template <class Executor>
MK_HOST_DEVICE constexpr std::uint32_t tokens_at_once() {
  if constexpr (requires { Executor::kTokensAtOnce; }) {
    return Executor::kTokensAtOnce;
  } else {
    return 8;
  }
}

/// The sums of the run's tokens, when all that belongs to them is here.
template <class Executor>
MK_HOST_DEVICE inline bool sum_run(CombineBlock<Executor>& block, const CombineRun& run) {
  if (!block.await_run_of(run)) return false;
  if constexpr (requires { block.executor.sum_run(block, run); }) {
    block.executor.sum_run(block, run);
  } else {
    const World& world = block.world;
    const bool own = block.is_own(run);
    for (std::uint32_t i = run.begin; i < run.end; ++i) {
      const CombineSum job = block.sum_of(run, i);
      const auto sums_of = [&](std::uint32_t begin, std::uint32_t end) {
        return [&block, own, begin, end, token = job.token](auto&& visit) {
          if (own) block.each_sum(begin, end, token, visit);
        };
      };
      block.executor.sum(
          job, sums_of(0, world.node),
          [&](auto&& visit) { block.each_row(run.node, job.token, visit); },
          sums_of(world.node + 1, world.nodes));
    }
  }
  return true;
}

/// The steps of a role that `workers` blocks share: `index`, `index` + workers, ...; or, where the
/// executor has them taken, the next that nobody has.
template <class Executor>
MK_HOST_DEVICE inline std::uint32_t first_step(CombineBlock<Executor>& block) {
  if constexpr (requires { block.executor.take_step(block.role); }) {
    return block.executor.take_step(block.role);
  } else {
    return block.index;
  }
}
template <class Executor>
MK_HOST_DEVICE inline std::uint32_t next_step(CombineBlock<Executor>& block, std::uint32_t step,
                                              std::uint32_t workers) {
  if constexpr (requires { block.executor.take_step(block.role); }) {
    return block.executor.take_step(block.role);
  } else {
    return step + workers;
  }
}

/// The owner's sums of one chunk for the rail peer on `node`.
template <class Executor>
MK_HOST_DEVICE inline bool reduce_chunk(CombineBlock<Executor>& block, std::uint32_t node,
                                        std::uint32_t chunk) {
  constexpr std::uint32_t kAtOnce = tokens_at_once<Executor>();
  const TileRange range = block.schedule.chunk_tokens(block.peer(node)->tokens, chunk);
  for (std::uint32_t begin = range.begin; begin < range.end; begin += kAtOnce) {
    const std::uint32_t left = range.end - begin;
    if (!sum_run(block, {node, begin, left < kAtOnce ? range.end : begin + kAtOnce})) return false;
  }
  block.publish_chunk(node, chunk);
  return true;
}

/// The owner's sums for the ranks of its rail: those chunks that carry sums. Only with several
/// nodes.
template <class Executor>
MK_HOST_DEVICE inline bool reduce(CombineBlock<Executor>& block) {
  if (!block.await_turn() || !block.await_plan() || !block.await_staging_free()) return false;
  std::uint32_t step = first_step(block);
  std::uint32_t before = 0;  // chunks for the nodes before
  for (std::uint32_t position = 0; position + 1 < block.world.nodes; ++position) {
    const std::uint32_t node = block.schedule.node_after(position);
    const std::uint32_t chunks = block.schedule.chunks(block.peer(node)->tokens) - 1;
    for (; step - before < chunks; step = next_step(block, step, block.launch.blocks.reduce)) {
      if (!reduce_chunk(block, node, step - before + 1)) return false;
    }
    before += chunks;
  }
  return true;
}

/// Every header has arrived.
template <class Executor>
MK_HOST_DEVICE inline bool await_headers(CombineBlock<Executor>& block) {
  for (std::uint32_t node = 0; node < block.world.nodes; ++node) {
    if (node != block.world.node && !block.await_arrival(node, 0)) return false;
  }
  return true;
}

/// Each chunk as soon as it is reduced, to the rail peer on its node.
template <class Executor>
MK_HOST_DEVICE inline bool send_chunks(CombineBlock<Executor>& block, Channel<Executor>& channel) {
  const CombineSchedule& schedule = block.schedule;
  const World& world = block.world;
  const FlagMap flags = schedule.flags();
  if (!block.await_staging_free()) return false;
  std::uint32_t first = block.index;  // of the node's chunks, or of those after it
  for (std::uint32_t position = 0; position + 1 < world.nodes; ++position) {
    const std::uint32_t node = schedule.node_after(position);
    const std::uint32_t tokens = block.peer(node)->tokens;
    const ChunkRun run = ChunkRun::below(schedule.chunks(tokens), first, block.launch.blocks.send);
    const Route route{node, schedule.staging_bank(block.bank, world.node, node),
                      schedule.receive_bank(block.bank, node, world.node),
                      flags.arrival(block.bank, node, world.node, 0)};
    const bool sent = channel.send_when_ready(
        {run, 1, schedule.chunk_bytes(), world.node, &flags},
        [&](std::uint32_t /*peer*/) { return route; },
        [&](std::uint32_t chunk) { return schedule.chunk_range(tokens, chunk); },
        [&](std::uint32_t chunk, std::uint32_t /*count*/) -> std::uint32_t {
          if (chunk != 0) return block.await_chunk_reduced(node, chunk) ? 1 : 0;
          block.write_header(node);
          return 1;
        });
    if (!sent) return false;
    first = run.end() - schedule.chunks(tokens);
  }
  channel.note_sent();
  return true;
}

/// The owner's way to the network, through ring `index`. Only with several nodes.
template <class Executor>
MK_HOST_DEVICE inline bool send(CombineBlock<Executor>& block) {
  if (!block.await_turn() || !block.await_plan()) return false;
  Channel<Executor> channel(block);
  const auto sent_to = [&](std::uint32_t node) {
    return block.schedule.chunks(block.peer(node)->tokens);
  };
  const auto received_from = [&](std::uint32_t node) {
    return block.schedule.chunks(block.tokens_from(node));
  };
  return send_chunks(block, channel) &&
         (block.index != 0 ||
          (await_headers(block) &&
           end_exchange(block, channel, block.schedule.flags(), sent_to, received_from)));
}

/// Whether all ranks' rows are those of this rank's tokens, when all headers are here. Else it
/// names the first rank that has none because its Dispatch+GEMM failed, else the first whose rows
/// do not fit.
template <class Executor>
MK_HOST_DEVICE inline CombineVerdict verdict_of(const CombineBlock<Executor>& block) {
  const World& world = block.world;
  CombineVerdict verdict;
  if (block.words->fault.in_ids()) return {world.rank() + 1, 0};
  for (std::uint32_t rank = 0; rank < world.size(); ++rank) {
    const std::uint64_t check = block.check_of(rank / world.locals, rank % world.locals);
    if (check == kCombineIncomplete) return {rank + 1, 1};
    if (check != block.expected()[rank] && verdict.bad_rank == 0) verdict.bad_rank = rank + 1;
  }
  return verdict;
}

/// Everything that others store here in this launch is here, also what is of no use: so that none
/// of it can come while the next launch is under way.
template <class Executor>
MK_HOST_DEVICE inline bool await_all(CombineBlock<Executor>& block, bool all_tiles,
                                     std::uint32_t workers) {
  const World& world = block.world;
  for (std::uint32_t node = 0; node < world.nodes; ++node) {
    if (node == world.node) continue;
    const std::uint32_t chunks = block.schedule.chunks(block.tokens_from(node));
    for (std::uint32_t chunk = block.index; chunk < chunks; chunk += workers) {
      if (!block.await_arrival(node, chunk)) return false;
    }
  }
  for (std::uint32_t local = 0; all_tiles && local < world.locals; ++local) {
    const std::uint32_t* const tiles = &block.words_of(local)->tiles;
    for (std::uint32_t tile = 0; tile < *tiles; ++tile) {
      if (!block.await_tile(block.schedule.tile_flag(local, tile))) return false;
    }
  }
  return true;
}

/// This rank's output, some tokens at a time, of which this is one of `workers` blocks. In every
/// world.
template <class Executor>
MK_HOST_DEVICE inline bool receive(CombineBlock<Executor>& block, std::uint32_t workers) {
  if (!block.await_turn() || !block.await_plan() || !await_headers(block)) return false;
  const CombineVerdict verdict = verdict_of(block);
  if (block.index == 0) block.note_verdict(verdict);
  bool all_tiles = verdict.bad_rank != 0;
  for (std::uint32_t node = 0; node < block.world.nodes; ++node)
    all_tiles |= block.peer(node)->clash != 0;
  const std::uint32_t tokens = verdict.bad_rank != 0 ? 0 : block.launch.routing.tokens;
  constexpr std::uint32_t kAtOnce = tokens_at_once<Executor>();
  const std::uint32_t steps = div_up(tokens, kAtOnce);
  for (std::uint32_t step = first_step(block); step < steps;
       step = next_step(block, step, workers)) {
    if (block.stopped()) return false;
    const std::uint64_t begin_ns = block.span_begin();
    const std::uint32_t begin = step * kAtOnce;
    const std::uint32_t end = tokens - begin < kAtOnce ? tokens : begin + kAtOnce;
    if (!sum_run(block, {block.world.node, begin, end})) return false;
    block.span_end(begin_ns, SpanKind::kSum, begin, block.world.node, block.world.rank());
  }
  if (!await_all(block, all_tiles, workers)) return false;
  block.publish_done(workers);
  return true;
}
template <class Executor>
MK_HOST_DEVICE inline bool receive(CombineBlock<Executor>& block) {
  return receive(block, block.launch.blocks.receive);
}

}  // namespace mk::kernels::gemm_combine
