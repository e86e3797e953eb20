/// \file
/// What the blocks of GEMM + Combine do, and what waits for what. Flags, entries and commands are
/// here, once for all executors; the executor brings the arithmetic:
///
///     bool multiply(const CombineTile&, uint32_t padded_rows, const TileRect& columns,
///                   std::byte* place_of(uint32_t i));
///                          the tile's rows times the columns of the expert's weights, row i of
///                          them times its weight, as a partial at place_of(i); false: it cannot,
///                          and has noted why
///     void sum(const CombineSum&, before, rows, after);
///                          adds up what before(visit), rows(visit) and after(visit) name; the rows
///                          first for themselves
///     bool last_part(Role, uint32_t chunk, uint32_t parts);      comm/block.h
///     and what else comm/block.h asks for
///
/// The way of a product row, with the flag that hands each step to the next. All flags hold the
/// epoch, and each has one writer. The **owner** of a row is the local rank, on the node where the
/// row is made, that has the rail of the token's rank:
///
///     role     on            does                                     then shows
///     plan     every rank    its rows -> entries and notes at their
///                            owners; the order of its tiles           indexed[source] at each
///                            owner
///              owner         entries -> which tokens it has rows of   done[plan]
///     compute  every rank    rows x weights -> slots at the owners    tile_ready[source][row tile]
///     reduce   owner         slots -> a token's sum -> staging        chunk_reduced[node][chunk]
///     send     owner         staging -> receive bank of the rail peer arrival[bank][from][chunk]
///     receive  token's rank  slots and receive banks -> its output
///
/// There is no reduce and no send with one node. A token's sum goes in slot order within a node;
/// the nodes' sums go in node order, this node's own in its place; then comes the residual. So
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
///    rank hears, in every launch, of every rail peer, if only by a header, and a launch ends after
///    every chunk has arrived.
///  - All else is this rank's own and lasts for one launch.
///
/// Handles that do not fit: every rank sees from notes and headers whether each rank's rows are
/// those of its tokens (row_index.h), before it stores anything. If not, it says whose rows do not
/// fit, stores nothing, and does its part to the end: all ranks can launch again.
#pragma once

#include <cstdint>

#include "kernels/comm/exchange.h"
#include "kernels/ops/combine/block.h"

namespace mk::kernels::gemm_combine {

// Each role answers whether it ran to its end. If not, the launch has failed; its first cause is in
// `launch.local->failure` or with the executor.

/// This block's row tiles: entries for their rows at the owners, and what it found in them.
template <class Executor>
MK_HOST_DEVICE inline void index_rows(CombineBlock<Executor>& block) {
  const World& world = block.world;
  for (std::uint32_t rank = 0; rank < world.size(); ++rank)
    *block.block_note(block.index, rank) = {};
  const auto index_tile = [&](std::uint32_t number, CombineTile tile) {
    if (number % block.launch.blocks.plan != block.index) return;
    tile.urgency = ~0u;
    for (std::uint32_t i = tile.row; i < tile.row + tile.rows; ++i) {
      const MoeRow row = block.rows.row(i);
      const std::uint32_t urgency = block.rows.urgency_of(row);
      if (urgency < tile.urgency) tile.urgency = urgency;
      block.rows.add(*block.block_note(block.index, row.rank), row, tile.expert);
      *block.entry(row.rank % world.locals, row.rank / world.locals, row.token, row.slot) = {
          block.epoch, block.schedule.tile_flag(world.local, number)};
    }
    block.tiles()[number] = tile;
  };
  const std::uint32_t tiles = block.launch.complete ? block.rows.for_each_tile(index_tile) : 0;
  if (block.index == 0) block.words->tiles = tiles;
}

/// What all plan blocks of this rank found, to the owners.
template <class Executor>
MK_HOST_DEVICE inline void hand_out_notes(CombineBlock<Executor>& block) {
  const World& world = block.world;
  for (std::uint32_t rank = 0; rank < world.size(); ++rank) {
    CombineNote sum;
    for (std::uint32_t i = 0; i < block.launch.blocks.plan; ++i) {
      const CombineNote& found = *block.block_note(i, rank);
      sum.check += found.check;
      sum.rows += found.rows;
      sum.end = found.end > sum.end ? found.end : sum.end;
    }
    sum.check = block.launch.complete ? sum.check & ~kCombineIncomplete : kCombineIncomplete;
    *block.note(rank % world.locals, world.local, rank / world.locals) = sum;
  }
}

/// The checks that this rank's own ids ask for.
template <class Executor>
MK_HOST_DEVICE inline void expect_checks(CombineBlock<Executor>& block) {
  const CombineShape& shape = block.launch.plan.shape;
  const RoutingTable& routing = block.launch.routing;
  const std::uint32_t ranks = block.world.size();
  std::uint64_t* const expected = block.expected();
  for (std::uint32_t rank = 0; rank < ranks; ++rank) expected[rank] = 0;
  for (std::uint32_t token = 0; token < routing.tokens; ++token) {
    const std::int32_t* ids = routing.ids + std::uint64_t{token} * routing.stride;
    for (std::uint32_t slot = 0; slot < shape.top_k; ++slot) {
      if (ids[slot] < 0) continue;
      const auto expert = static_cast<std::uint32_t>(ids[slot]);
      expected[rank_of_expert(expert, shape.experts, ranks)] +=
          block.rows.hash_of(token, slot, expert);
    }
  }
  for (std::uint32_t rank = 0; rank < ranks; ++rank) expected[rank] &= ~kCombineIncomplete;
}

/// Where the sums of this rank's tokens stand in what comes from that node.
template <class Executor>
MK_HOST_DEVICE inline void find_places(CombineBlock<Executor>& block, std::uint32_t node) {
  const CombineShape& shape = block.launch.plan.shape;
  const RoutingTable& routing = block.launch.routing;
  const std::uint32_t locals = block.world.locals;
  std::uint32_t* const places = block.places(node);
  std::uint32_t count = 0;
  for (std::uint32_t token = 0; token < routing.tokens; ++token) {
    const std::int32_t* ids = routing.ids + std::uint64_t{token} * routing.stride;
    bool there = false;
    for (std::uint32_t slot = 0; slot < shape.top_k && !there; ++slot) {
      there = ids[slot] >= 0 && rank_of_expert(static_cast<std::uint32_t>(ids[slot]), shape.experts,
                                               block.world.size()) /
                                        locals ==
                                    node;
    }
    places[token] = there ? ++count : 0;
  }
}

/// The tokens of the rail peer on `node` that have rows on this one, from the node's entries.
template <class Executor>
MK_HOST_DEVICE inline void list_tokens(CombineBlock<Executor>& block, std::uint32_t node) {
  const World& world = block.world;
  std::uint32_t end = 0;
  std::uint64_t rows = 0;
  for (std::uint32_t local = 0; local < world.locals; ++local) {
    const CombineNote& note = *block.note(world.local, local, node);
    rows += note.rows;
    end = note.end > end ? note.end : end;
  }
  CombinePeer peer;
  std::uint64_t entries = 0;
  for (std::uint32_t token = 0; token < end; ++token) {
    const std::uint64_t before = entries;
    for (std::uint32_t slot = 0; slot < block.launch.plan.shape.top_k; ++slot)
      entries += block.entry(world.local, node, token, slot)->epoch == block.epoch ? 1 : 0;
    if (entries != before) block.list(node)[peer.tokens++] = token;
  }
  peer.clash = entries != rows ? 1 : 0;
  *block.peer(node) = peer;
}

/// Which product rows there are: this rank's rows to their owners, then as an owner what the node
/// has for each of its rail's ranks.
template <class Executor>
MK_HOST_DEVICE inline bool plan(CombineBlock<Executor>& block) {
  const World& world = block.world;
  if (!block.await_all_finished(block.epoch - 1)) return false;
  index_rows(block);
  block.publish_counted();
  if (block.index == 0) {
    if (!block.await_counted()) return false;
    block.rows.arrange(block.tiles(), block.words->tiles, block.order());
    hand_out_notes(block);
    block.publish_indexed();
  }
  if (!block.await_all_indexed()) return false;
  for (std::uint32_t node = block.index; node < world.nodes; node += block.launch.blocks.plan) {
    list_tokens(block, node);
    if (node == world.node) {
      expect_checks(block);
    } else {
      find_places(block, node);
    }
  }
  block.publish_done(block.launch.blocks.plan);
  return true;
}

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
                      const auto place_of = [&](std::uint32_t i) {
                        return block.slot_of(block.rows.row(tile.row + i)) + offset;
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

/// The owner's sums of one chunk for the rail peer on `node`.
template <class Executor>
MK_HOST_DEVICE inline bool reduce_chunk(CombineBlock<Executor>& block, std::uint32_t node,
                                        std::uint32_t chunk) {
  const TileRange range = block.schedule.chunk_tokens(block.peer(node)->tokens, chunk);
  const auto none = [](auto&&) {};
  for (std::uint32_t i = range.begin; i < range.end; ++i) {
    const std::uint32_t token = block.list(node)[i];
    if (!block.await_rows(node, token)) return false;
    block.executor.sum(
        {block.staging(node) + block.schedule.sum_in_bank(i), token}, none,
        [&](auto&& visit) { block.each_row(node, token, visit); }, none);
  }
  block.publish_chunk(node, chunk);
  return true;
}

/// The owner's sums for the ranks of its rail, chunks `index`, `index` + reduce blocks, ... of
/// those that carry sums. Only with several nodes.
template <class Executor>
MK_HOST_DEVICE inline bool reduce(CombineBlock<Executor>& block) {
  if (!block.await_turn() || !block.await_plan() || !block.await_staging_free()) return false;
  std::uint32_t turn = block.index;
  for (std::uint32_t position = 0; position + 1 < block.world.nodes; ++position) {
    const std::uint32_t node = block.schedule.node_after(position);
    const std::uint32_t chunks = block.schedule.chunks(block.peer(node)->tokens) - 1;
    for (; turn < chunks; turn += block.launch.blocks.reduce) {
      if (!reduce_chunk(block, node, turn + 1)) return false;
    }
    turn -= chunks;
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

/// Whether all ranks' rows are those of this rank's tokens, when all headers are here: the first
/// rank that has none because its Dispatch + GEMM failed, else the first whose rows do not fit.
template <class Executor>
MK_HOST_DEVICE inline CombineVerdict verdict_of(const CombineBlock<Executor>& block) {
  const World& world = block.world;
  CombineVerdict verdict;
  for (std::uint32_t rank = 0; rank < world.size(); ++rank) {
    const std::uint64_t check = block.check_of(rank / world.locals, rank % world.locals);
    if (check == kCombineIncomplete) return {rank + 1, 1};
    if (check != block.expected()[rank] && verdict.bad_rank == 0) verdict.bad_rank = rank + 1;
  }
  return verdict;
}

/// The output of one of this rank's tokens, from its rows here and the sums that have come.
template <class Executor>
MK_HOST_DEVICE inline bool receive_token(CombineBlock<Executor>& block, std::uint32_t token) {
  const World& world = block.world;
  for (std::uint32_t node = 0; node < world.nodes; ++node) {
    if (node == world.node) continue;
    const std::uint32_t place = block.places(node)[token];
    if (place != 0 && !block.await_arrival(node, block.schedule.chunk_of(place - 1))) return false;
  }
  if (!block.await_rows(world.node, token)) return false;
  block.executor.sum(
      {nullptr, token}, [&](auto&& visit) { block.each_sum(0, world.node, token, visit); },
      [&](auto&& visit) { block.each_row(world.node, token, visit); },
      [&](auto&& visit) { block.each_sum(world.node + 1, world.nodes, token, visit); });
  return true;
}

/// Everything that others store here in this launch is here, also what is of no use: so that none
/// of it can come while the next launch is under way.
template <class Executor>
MK_HOST_DEVICE inline bool await_all(CombineBlock<Executor>& block, bool all_tiles) {
  const World& world = block.world;
  for (std::uint32_t node = 0; node < world.nodes; ++node) {
    if (node == world.node) continue;
    const std::uint32_t chunks = block.schedule.chunks(block.tokens_from(node));
    for (std::uint32_t chunk = block.index; chunk < chunks; chunk += block.launch.blocks.receive) {
      if (!block.await_arrival(node, chunk)) return false;
    }
  }
  for (std::uint32_t local = 0; all_tiles && local < world.locals; ++local) {
    const auto* tiles =
        &reinterpret_cast<const CombineWords*>(block.at(local, block.launch.plan.layout.words))
             ->tiles;
    for (std::uint32_t tile = 0; tile < *tiles; ++tile) {
      if (!block.await_tile(block.schedule.tile_flag(local, tile))) return false;
    }
  }
  return true;
}

/// Tokens that a receive block takes at a time.
inline constexpr std::uint32_t kTokensAtOnce = 8;

/// This rank's output, tokens by eights: those of `index`, `index` + receive blocks, .... In every
/// world.
template <class Executor>
MK_HOST_DEVICE inline bool receive(CombineBlock<Executor>& block) {
  if (!block.await_turn() || !block.await_plan() || !await_headers(block)) return false;
  const CombineVerdict verdict = verdict_of(block);
  if (block.index == 0) block.words->verdict = verdict;
  bool all_tiles = verdict.bad_rank != 0;
  for (std::uint32_t node = 0; node < block.world.nodes; ++node)
    all_tiles |= block.peer(node)->clash != 0;
  const std::uint32_t tokens = verdict.bad_rank != 0 ? 0 : block.launch.routing.tokens;
  const std::uint32_t step = kTokensAtOnce * block.launch.blocks.receive;
  for (std::uint32_t begin = kTokensAtOnce * block.index; begin < tokens; begin += step) {
    const std::uint64_t begin_ns = block.span_begin();
    const std::uint32_t end = tokens - begin < kTokensAtOnce ? tokens : begin + kTokensAtOnce;
    for (std::uint32_t token = begin; token < end; ++token) {
      if (!receive_token(block, token)) return false;
    }
    block.span_end(begin_ns, SpanKind::kSum, begin, block.world.node, block.world.rank());
  }
  if (!await_all(block, all_tiles)) return false;
  block.publish_done(block.launch.blocks.receive);
  return true;
}

}  // namespace mk::kernels::gemm_combine
