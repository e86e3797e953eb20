/// \file
/// From the rows that MoE Dispatch+GEMM left on a rank to what GEMM+Combine does with them. It
/// says which row tiles there are, in which order they are computed, and which product row belongs
/// to which token. Plain index arithmetic, for host and device.
///
/// A rank with product rows tells the **owner** of each: the local rank of its own node that has
/// the rail of the token's rank. It writes an entry for (origin node, token, slot), which says
/// where the owner sees that the row is complete, and a note per origin node, which sums up what it
/// wrote. So nobody exchanges anything between nodes to know which rows there are: an owner sees it
/// from its node's entries, and a token's rank from its own routing table.
///
/// **Checks.** A note's check is a sum of hashes of (token, slot, expert). A token's rank computes
/// the same sum from its own ids, for each rank that has experts. So it sees whether the rows are
/// those of its tokens, and if not, whose rows they are.
#pragma once

#include <cstdint>

#include "kernels/comm/shard.h"
#include "kernels/comm/world.h"
#include "kernels/ops/combine/geometry.h"
#include "kernels/ops/moe/routing_plan.h"
#include "shm/limits.h"
#include "shm/platform.h"

namespace mk::kernels {

/// Rows [row, row + rows) of this rank's, all of one expert.
struct CombineTile {
  std::uint32_t expert = 0;  ///< counted from this rank's first
  std::uint32_t row = 0;
  std::uint32_t rows = 0;
  std::uint32_t urgency = 0;  ///< of its most urgent row: RowIndex::urgency_of
};

/// The first of each thing that a handle or a routing table may not say: what the memory holds is
/// checked where it is read. kNone: there is none.
struct CombineFault {
  static constexpr std::uint32_t kNone = 0xffffffff;
  std::uint32_t expert =
      kNone;                   ///< whose rows do not begin where those before end, or reach too far
  std::uint32_t row = kNone;   ///< of a rank, token or slot that does not exist
  std::uint32_t slot = kNone;  ///< token * top_k + slot: its id is no expert's
  MK_HOST_DEVICE bool in_handle() const { return expert != kNone || row != kNone; }
  MK_HOST_DEVICE bool in_ids() const { return slot != kNone; }
};

/// Of one slot of a token: its product row comes from a rank of this node.
struct CombineEntry {
  std::uint32_t epoch = 0;  ///< it counts in this launch only
  std::uint32_t flag = 0;   ///< which word of `tile_ready` shows it: local rank * tiles_max + tile
};

/// What one rank has for the tokens of one other.
struct CombineNote {
  std::uint64_t check = 0;
  std::uint32_t rows = 0;
  std::uint32_t end = 0;  ///< 1 + the last token among them
};

/// The check of a rank that has no rows because its Dispatch+GEMM failed, or whose handle makes
/// no sense. No sum of hashes has this bit.
inline constexpr std::uint64_t kCombineIncomplete = 1ull << 63;

/// The rank that has the expert: experts_of() the other way round.
MK_HOST_DEVICE constexpr std::uint32_t rank_of_expert(std::uint32_t expert, std::uint32_t experts,
                                                      std::uint32_t ranks) {
  // A GPU divides 32 bits several times as fast.
  if ((experts | ranks) <= 0xffff) return ((expert + 1) * ranks - 1) / experts;
  return static_cast<std::uint32_t>(((std::uint64_t{expert} + 1) * ranks - 1) / experts);
}

/// One term of a check (a step of SplitMix64), below kCombineIncomplete.
MK_HOST_DEVICE constexpr std::uint64_t combine_hash(std::uint64_t number) {
  std::uint64_t hash = (number + 1) * 0x9e3779b97f4a7c15ull;
  hash = (hash ^ hash >> 30) * 0xbf58476d1ce4e5b9ull;
  hash = (hash ^ hash >> 27) * 0x94d049bb133111ebull;
  return (hash ^ hash >> 31) & ~kCombineIncomplete;
}

/// Lanes that make a piece of the index together, at most.
inline constexpr std::uint32_t kCombineLanesMax = 128;
/// Words of RowIndex::arrange's scratch, of `keys` urgencies.
MK_HOST_DEVICE constexpr std::uint64_t order_count_words(std::uint32_t keys) {
  return std::uint64_t{keys} * (kCombineLanesMax + 1);
}

/// Of one rank, over what its caller gave it.
class RowIndex {
 public:
  /// `rows` are grouped by expert as `offsets` says; there are `room` of them at most. No row
  /// behind that is looked at, whatever the offsets are.
  MK_HOST_DEVICE RowIndex(const CombineGeometry& plan, const World& world, const MoeRow* rows,
                          const std::uint32_t* offsets, std::uint32_t room)
      : plan_(plan),
        world_(world),
        rows_(rows),
        offsets_(offsets),
        room_(room < plan.rows_max ? room : plan.rows_max),
        experts_(experts_of(plan.shape.experts, world)) {}

  MK_HOST_DEVICE const MoeRow& row(std::uint32_t index) const { return rows_[index]; }
  /// This rank's.
  MK_HOST_DEVICE const ShardRange& experts() const { return experts_; }

  /// Calls visit(number, tile) for the row tiles `block`, `block` + blocks, ... of this rank,
  /// without their urgency. Tiles are numbered expert by expert, each one's rows in tiles of
  /// tile_m, the last one of what is left. By all lanes together: each visits those of its experts.
  /// Answers how many tiles all blocks have. None, if an expert is not in order.
  template <class Visit, class Lanes = OneLane>
  MK_HOST_DEVICE std::uint32_t for_tiles_of(std::uint32_t block, std::uint32_t blocks,
                                            Visit&& visit, const Lanes& lanes = {}) const {
    const TileRange run = run_of(lanes, experts_.count);
    const auto tiles_of = [&](std::uint32_t expert) {
      return div_up(offsets_[expert + 1] - offsets_[expert], plan_.tile_m);
    };
    std::uint32_t disordered = 0;
    std::uint32_t own = 0;
    for (std::uint32_t expert = run.begin; expert < run.end; ++expert) {
      if (is_in_order(expert)) {
        own += tiles_of(expert);
      } else {
        disordered = 1;
      }
    }
    if (sums_over(lanes, disordered).all != 0) return 0;
    const LaneSums tiles = sums_over(lanes, own);
    std::uint32_t number = tiles.before;
    for (std::uint32_t expert = run.begin; expert < run.end; ++expert) {
      const std::uint32_t count = tiles_of(expert);
      const std::uint32_t over = number % blocks;
      std::uint32_t i = block < over ? block + blocks - over : block - over;
      for (; i < count; i += blocks) {
        CombineTile tile;
        tile.expert = expert;
        tile.row = offsets_[expert] + i * plan_.tile_m;
        const std::uint32_t left = offsets_[expert + 1] - tile.row;
        tile.rows = left < plan_.tile_m ? left : plan_.tile_m;
        visit(number + i, tile);
      }
      number += count;
    }
    return tiles.all;
  }

  /// Which rows are computed first: those of the next node's tokens, then of the one after that,
  /// and so on, this node's last. Of one node in the order of the tokens.
  MK_HOST_DEVICE std::uint32_t urgency_of(const MoeRow& row) const {
    const std::uint32_t node = row.rank / plan_.locals;
    const std::uint32_t after = node + plan_.nodes - world_.node - 1;
    const std::uint32_t position = after < plan_.nodes ? after : after - plan_.nodes;
    const std::uint64_t place = std::uint64_t{row.token} * plan_.steps;
    const std::uint32_t tokens = plan_.shape.tokens_max;
    const std::uint32_t step = place <= 0xffffffff ? static_cast<std::uint32_t>(place) / tokens
                                                   : static_cast<std::uint32_t>(place / tokens);
    return position * plan_.steps + step;
  }

  /// Of a tile without a row that can be a token's, too.
  MK_HOST_DEVICE std::uint32_t least_urgent() const { return plan_.nodes * plan_.steps - 1; }

  /// What a row of that expert adds to its check. `expert`: of all ranks.
  MK_HOST_DEVICE std::uint64_t hash_of(std::uint32_t token, std::uint32_t slot,
                                       std::uint32_t expert) const {
    const std::uint64_t place = std::uint64_t{token} * plan_.shape.top_k + slot;
    return combine_hash(place * plan_.shape.experts + expert);
  }
  /// Adds the row, of this rank's expert `expert`, to the note of its token's rank.
  MK_HOST_DEVICE void add(CombineNote& note, const MoeRow& row, std::uint32_t expert) const {
    note.check += hash_of(row.token, row.slot, experts_.first + expert);
    ++note.rows;
    if (note.end <= row.token) note.end = row.token + 1;
  }

  /// `order`: the tiles by urgency, then by number. `counts`: order_count_words() of scratch. By
  /// all lanes together.
  template <class Lanes = OneLane>
  MK_HOST_DEVICE void arrange(const CombineTile* tiles, std::uint32_t count, std::uint32_t* order,
                              std::uint32_t* counts, const Lanes& lanes = {}) const {
    // Each lane has a run of the tiles. Of each urgency, first how many are in each run.
    const std::uint32_t keys = plan_.nodes * plan_.steps;
    const TileRange run = run_of(lanes, count);
    const auto of = [&](std::uint32_t key, std::uint32_t lane) {
      return counts + std::uint64_t{key} * (kCombineLanesMax + 1) + lane;
    };
    for (std::uint32_t key = 0; key < keys; ++key) *of(key, lanes.index) = 0;
    for (std::uint32_t i = run.begin; i < run.end; ++i) ++*of(tiles[i].urgency, lanes.index);
    lanes.sync();
    for (std::uint32_t key = lanes.index; key < keys; key += lanes.count) {
      std::uint32_t sum = 0;
      for (std::uint32_t lane = 0; lane < lanes.count; ++lane) {
        const std::uint32_t its = *of(key, lane);
        *of(key, lane) = sum;
        sum += its;
      }
      *of(key, kCombineLanesMax) = sum;
    }
    lanes.sync();
    if (lanes.index == 0) {
      std::uint32_t start = 0;
      for (std::uint32_t key = 0; key < keys; ++key) {
        const std::uint32_t its = *of(key, kCombineLanesMax);
        *of(key, kCombineLanesMax) = start;
        start += its;
      }
    }
    lanes.sync();
    for (std::uint32_t i = run.begin; i < run.end; ++i) {
      const std::uint32_t key = tiles[i].urgency;
      order[*of(key, kCombineLanesMax) + (*of(key, lanes.index))++] = i;
    }
  }

  /// Whether the row can be a token's: of a rank, token and slot that exist.
  MK_HOST_DEVICE bool is_possible(const MoeRow& row) const { return is_possible(plan_, row); }
  MK_HOST_DEVICE static bool is_possible(const CombineGeometry& plan, const MoeRow& row) {
    return row.rank < plan.nodes * plan.locals && row.token < plan.shape.tokens_max &&
           row.slot < plan.shape.top_k;
  }
  /// Whether the expert's rows begin where those before end, and all can be there.
  MK_HOST_DEVICE bool is_in_order(std::uint32_t expert) const {
    return offsets_[expert] <= offsets_[expert + 1] && offsets_[expert + 1] <= room_ &&
           (expert != 0 || offsets_[0] == 0);
  }
  /// The first row that no token can have: of no rank, beyond tokens_max, or of no slot. `count`:
  /// none.
  MK_HOST_DEVICE std::uint32_t first_impossible_row(std::uint32_t count) const {
    for (std::uint32_t i = 0; i < count; ++i) {
      if (!is_possible(rows_[i])) return i;
    }
    return count;
  }

 private:
  CombineGeometry plan_;
  World world_;
  const MoeRow* rows_;
  const std::uint32_t* offsets_;
  std::uint32_t room_;
  ShardRange experts_;
};

}  // namespace mk::kernels
