/// \file
/// The plan role of GEMM+Combine (protocol.h has the others): it makes the index, which says what
/// product rows there are and who sums which. Its pieces may be done by several lanes together
/// (routing_plan.h: OneLane). What they make does not depend on how many blocks and lanes they are.
#pragma once

#include <cstdint>

#include "kernels/ops/combine/block.h"
#include "kernels/ops/combine/lateness.h"

namespace mk::kernels::gemm_combine {

/// What one block, or its lanes, do of the index at a time.
enum class CombinePiece : std::uint32_t {
  kRows,   ///< its row tiles and its parts of the ids
  kOrder,  ///< what all blocks have found: the order, the notes, the checks
  kCount,  ///< its parts of the node's entries, counted; where its parts of the sums stand
  kList,   ///< its parts of the node's entries, listed; and of its own tokens, in order
};

/// What a lane has found of one rank and not added to the block's yet: rows that follow each other
/// are mostly of one.
template <class Executor, class Lanes>
class NoteOfLane {
 public:
  MK_HOST_DEVICE NoteOfLane(const CombineBlock<Executor>& block, const Lanes& lanes)
      : block_(block), lanes_(lanes) {}
  MK_HOST_DEVICE void add(const MoeRow& row, std::uint32_t expert) {
    if (row.rank != rank_) flush();
    rank_ = row.rank;
    block_.rows.add(note_, row, expert);
  }
  MK_HOST_DEVICE void flush() {
    if (note_.rows == 0) return;
    CombineNote* const to = block_.block_note(block_.index, rank_);
    lanes_.add(&to->check, note_.check);
    lanes_.add(&to->rows, note_.rows);
    lanes_.most(&to->end, note_.end);
    note_ = {};
  }

 private:
  const CombineBlock<Executor>& block_;
  const Lanes& lanes_;
  std::uint32_t rank_ = 0;
  CombineNote note_;
};

/// This block's row tiles: entries for their rows at the owners, and what it found in them.
template <class Executor, class Lanes>
MK_HOST_DEVICE inline void index_rows(const CombineBlock<Executor>& block, const Lanes& lanes) {
  const World& world = block.world;
  const std::uint32_t blocks = block.launch.blocks.plan;
  const bool complete = block.complete();
  CombineFault* const fault = &block.words->faults[block.index];
  for (std::uint32_t rank = lanes.index; rank < world.size(); rank += lanes.count)
    *block.block_note(block.index, rank) = {};
  if (lanes.index == 0) *fault = CombineFault{};
  std::uint32_t tiles = 0;
  if (complete) {
    tiles = block.rows.for_tiles_of(
        block.index, blocks,
        [&](std::uint32_t number, CombineTile tile) {
          tile.urgency = block.rows.least_urgent();
          block.tiles()[number] = tile;
        },
        lanes);
  }
  if (block.index == 0 && lanes.index == 0) block.words->tiles = tiles;
  lanes.sync();
  if (!complete) return;
  if (block.index == 0) {
    for (std::uint32_t e = lanes.index; e < block.rows.experts().count; e += lanes.count)
      if (!block.rows.is_in_order(e)) lanes.least(&fault->expert, e);
  }
  NoteOfLane<Executor, Lanes> note(block, lanes);
  for (std::uint32_t number = block.index; number < tiles; number += blocks) {
    // Not its urgency, which other lanes lessen meanwhile.
    CombineTile& tile = block.tiles()[number];
    const std::uint32_t expert = tile.expert;
    const std::uint32_t end = tile.row + tile.rows;
    const std::uint32_t least_urgent = block.rows.least_urgent();
    std::uint32_t most_urgent = least_urgent;
    for (std::uint32_t i = tile.row + lanes.index; i < end; i += lanes.count) {
      const MoeRow row = block.rows.row(i);
      if (!block.rows.is_possible(row)) {
        lanes.least(&fault->row, i);
        continue;
      }
      const std::uint32_t urgency = block.rows.urgency_of(row);
      if (urgency < most_urgent) most_urgent = urgency;
      note.add(row, expert);
      *block.entry(row.rank % world.locals, row.rank / world.locals, row.token, row.slot) = {
          block.epoch, block.schedule.tile_flag(world.local, number)};
    }
    if (most_urgent < least_urgent) lanes.least(&tile.urgency, most_urgent);
  }
  note.flush();
}

/// Which of nodes [first, first + 32) have an expert of the token; a bit for each.
template <class Executor>
MK_HOST_DEVICE inline std::uint32_t nodes_of(const CombineBlock<Executor>& block,
                                             std::uint32_t token, std::uint32_t first) {
  const CombineShape& shape = block.launch.plan.shape;
  const RoutingTable& routing = block.launch.routing;
  std::uint32_t nodes = 0;
  for (std::uint32_t slot = 0; slot < shape.top_k; ++slot) {
    const std::int32_t id = routing.ids[std::uint64_t{token} * routing.stride + slot];
    const auto expert = static_cast<std::uint32_t>(id);
    if (expert >= shape.experts) continue;
    const std::uint32_t node =
        rank_of_expert(expert, shape.experts, block.world.size()) / block.world.locals - first;
    if (node < 32) nodes |= 1u << node;
  }
  return nodes;
}

/// The checks that this block's share of this rank's own ids asks for.
template <class Executor, class Lanes>
MK_HOST_DEVICE inline void expect_checks(const CombineBlock<Executor>& block, const Lanes& lanes) {
  const World& world = block.world;
  const CombineShape& shape = block.launch.plan.shape;
  const RoutingTable& routing = block.launch.routing;
  std::uint64_t* const expected = block.expected(block.index);
  for (std::uint32_t rank = lanes.index; rank < world.size(); rank += lanes.count)
    expected[rank] = 0;
  lanes.sync();
  std::uint32_t last_rank = 0;
  std::uint64_t checks = 0;  // that are not added to the last rank's yet
  const TileRange run =
      run_of(block.index * lanes.count + lanes.index, block.launch.blocks.plan * lanes.count,
             routing.tokens * shape.top_k);
  std::uint32_t token = run.begin / shape.top_k;
  std::uint32_t slot = run.begin - token * shape.top_k;
  for (std::uint32_t i = run.begin; i < run.end; ++i) {
    const std::int32_t id = routing.ids[std::uint64_t{token} * routing.stride + slot];
    const auto expert = static_cast<std::uint32_t>(id);
    if (expert < shape.experts) {
      const std::uint32_t rank = rank_of_expert(expert, shape.experts, world.size());
      if (rank != last_rank && checks != 0) {
        lanes.add(&expected[last_rank], checks);
        checks = 0;
      }
      last_rank = rank;
      checks += block.rows.hash_of(token, slot, expert);
    } else if (id != -1) {
      lanes.least(&block.words->faults[block.index].slot, i);
    }
    if (++slot == shape.top_k) {
      slot = 0;
      ++token;
    }
  }
  if (checks != 0) lanes.add(&expected[last_rank], checks);
}

/// Which of the block's parts of this rank's tokens get a sum from each other node, and how many.
template <class Executor, class Lanes>
MK_HOST_DEVICE inline void expect_sums(const CombineBlock<Executor>& block, const Lanes& lanes) {
  const World& world = block.world;
  for_own_parts(
      block, lanes, block.launch.routing.tokens, [&](std::uint32_t part, const TileRange& tokens) {
        for (std::uint32_t node = 0; node < world.nodes; ++node)
          block.counts(node, part)->there = 0;
        for (std::uint32_t token = tokens.begin; token < tokens.end; ++token) {
          for (std::uint32_t first = 0; first < world.nodes; first += 32) {
            const std::uint32_t nodes = nodes_of(block, token, first);
            for (std::uint32_t node = first; node < world.nodes && node - first < 32; ++node) {
              const std::uint32_t there = nodes >> (node - first) & 1;
              block.places(node)[token] = there;
              if (there != 0) ++block.counts(node, part)->there;
            }
          }
        }
      });
}

/// By block 0, when all plan blocks of this rank have counted.
template <class Executor, class Lanes>
MK_HOST_DEVICE inline void hand_out_notes(const CombineBlock<Executor>& block, const Lanes& lanes) {
  const World& world = block.world;
  const std::uint32_t blocks = block.launch.blocks.plan;
  block.rows.arrange(block.tiles(), block.words->tiles, block.order(), block.order_counts(), lanes);
  CombineFault fault;
  for (std::uint32_t i = 0; i < blocks; ++i) {
    const CombineFault& found = block.words->faults[i];
    fault.expert = found.expert < fault.expert ? found.expert : fault.expert;
    fault.row = found.row < fault.row ? found.row : fault.row;
    fault.slot = found.slot < fault.slot ? found.slot : fault.slot;
  }
  if (lanes.index == 0) block.words->fault = fault;
  const bool sound = block.complete() && !fault.in_handle();
  for (std::uint32_t rank = lanes.index; rank < world.size(); rank += lanes.count) {
    CombineNote sum;
    std::uint64_t expected = 0;
    for (std::uint32_t i = 0; i < blocks; ++i) {
      const CombineNote& found = *block.block_note(i, rank);
      sum.check += found.check;
      sum.rows += found.rows;
      sum.end = found.end > sum.end ? found.end : sum.end;
      expected += block.expected(i)[rank];
    }
    sum.check = sound ? sum.check & ~kCombineIncomplete : kCombineIncomplete;
    *block.note(rank % world.locals, world.local, rank / world.locals) = sum;
    block.expected()[rank] = expected & ~kCombineIncomplete;
  }
}

/// Tokens of the rail peer on `node` that may have rows on this one, and these rows.
struct TokensHere {
  std::uint32_t end = 0;  ///< 1 + the last one
  std::uint64_t rows = 0;
};
template <class Executor>
MK_HOST_DEVICE inline TokensHere tokens_here(const CombineBlock<Executor>& block,
                                             std::uint32_t node) {
  TokensHere here;
  for (std::uint32_t local = 0; local < block.world.locals; ++local) {
    const CombineNote& note = *block.note(block.world.local, local, node);
    here.rows += note.rows;
    here.end = note.end > here.end ? note.end : here.end;
  }
  return here;
}
/// Its entries in this launch.
template <class Executor>
MK_HOST_DEVICE inline std::uint32_t entries_of(const CombineBlock<Executor>& block,
                                               std::uint32_t node, std::uint32_t token) {
  const CombineEntry* const entries = block.entry(block.world.local, node, token, 0);
  std::uint32_t count = 0;
  for (std::uint32_t slot = 0; slot < block.launch.plan.shape.top_k; ++slot)
    count += entries[slot].epoch == block.epoch ? 1 : 0;
  return count;
}

/// When all local ranks' entries are here: how many tokens of the block's parts have any; and where
/// the sums of this rank's tokens stand in what comes from each node.
template <class Executor, class Lanes>
MK_HOST_DEVICE inline void count_tokens(const CombineBlock<Executor>& block, const Lanes& lanes) {
  for (std::uint32_t node = 0; node < block.world.nodes; ++node) {
    for_own_parts(block, lanes, tokens_here(block, node).end,
                  [&](std::uint32_t part, const TileRange& tokens) {
                    std::uint32_t count = 0;
                    std::uint32_t entries = 0;
                    for (std::uint32_t token = tokens.begin; token < tokens.end; ++token) {
                      const std::uint32_t its = entries_of(block, node, token);
                      entries += its;
                      count += its != 0 ? 1 : 0;
                    }
                    block.counts(node, part)->tokens = count;
                    block.counts(node, part)->entries = entries;
                  });
    if (node == block.world.node) continue;
    for_own_parts(block, lanes, block.launch.routing.tokens,
                  [&](std::uint32_t part, const TileRange& tokens) {
                    std::uint32_t place = 0;
                    for (std::uint32_t before = 0; before < part; ++before)
                      place += block.counts(node, before)->there;
                    std::uint32_t* const places = block.places(node);
                    for (std::uint32_t token = tokens.begin; token < tokens.end; ++token)
                      places[token] = places[token] != 0 ? ++place : 0;
                  });
  }
}

/// When all of this rank's plan blocks have counted these: the tokens of the rail peers that have
/// rows on this node.
template <class Executor, class Lanes>
MK_HOST_DEVICE inline void list_tokens(const CombineBlock<Executor>& block, const Lanes& lanes) {
  for (std::uint32_t node = 0; node < block.world.nodes; ++node) {
    const TokensHere here = tokens_here(block, node);
    if (node != block.world.node) {
      for_own_parts(block, lanes, here.end, [&](std::uint32_t part, const TileRange& tokens) {
        std::uint32_t place = 0;
        for (std::uint32_t before = 0; before < part; ++before)
          place += block.counts(node, before)->tokens;
        for (std::uint32_t token = tokens.begin; token < tokens.end; ++token)
          if (entries_of(block, node, token) != 0) block.list(node)[place++] = token;
      });
    }
    if (block.index != 0 || node % lanes.count != lanes.index) continue;
    CombinePeer peer;
    std::uint64_t entries = 0;
    for (std::uint32_t part = 0; part < CombineSchedule::parts_of(here.end); ++part) {
      peer.tokens += block.counts(node, part)->tokens;
      entries += block.counts(node, part)->entries;
    }
    peer.clash = entries != here.rows ? 1 : 0;
    *block.peer(node) = peer;
  }
}

/// One piece of the index, by one lane of those that make it together.
template <class Executor, class Lanes>
MK_HOST_DEVICE inline void do_piece(const CombineBlock<Executor>& block, CombinePiece piece,
                                    const Lanes& lanes) {
  switch (piece) {
    case CombinePiece::kRows:
      index_rows(block, lanes);
      expect_checks(block, lanes);
      if (block.world.nodes > 1) expect_sums(block, lanes);
      break;
    case CombinePiece::kOrder:
      hand_out_notes(block, lanes);
      break;
    case CombinePiece::kCount:
      count_tokens(block, lanes);
      count_lateness(block, lanes);
      break;
    case CombinePiece::kList:
      list_tokens(block, lanes);
      order_tokens(block, lanes);
      break;
  }
}
template <class Executor>
MK_HOST_DEVICE inline void do_piece(CombineBlock<Executor>& block, CombinePiece piece) {
  if constexpr (requires { block.executor.do_piece(block, piece); }) {
    block.executor.do_piece(block, piece);
  } else {
    do_piece(block, piece, OneLane{});
  }
}

/// Which product rows there are: this rank's rows to their owners, then as an owner what the node
/// has for each of its rail's ranks.
template <class Executor>
MK_HOST_DEVICE inline bool plan(CombineBlock<Executor>& block) {
  if (!block.await_all_finished(block.epoch - 1)) return false;
  do_piece(block, CombinePiece::kRows);
  block.publish_counted();
  if (block.index == 0) {
    if (!block.await_counted()) return false;
    do_piece(block, CombinePiece::kOrder);
    block.publish_indexed();
  }
  if (!block.await_all_indexed()) return false;
  do_piece(block, CombinePiece::kCount);
  block.publish_listed();
  if (!block.await_listed()) return false;
  do_piece(block, CombinePiece::kList);
  block.publish_done(block.launch.blocks.plan);
  return true;
}

}  // namespace mk::kernels::gemm_combine
