/// \file
/// From the rows that MoE Dispatch + GEMM left on a rank to what GEMM + Combine does with them:
/// which row tiles there are, in which order they are computed, and which product row belongs to
/// which token. Plain index arithmetic, for host and device.
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

/// The check of a rank that has no rows because its Dispatch + GEMM failed. No sum of hashes has
/// this bit.
inline constexpr std::uint64_t kCombineIncomplete = 1ull << 63;

/// The rank that has the expert: experts_of() the other way round.
MK_HOST_DEVICE constexpr std::uint32_t rank_of_expert(std::uint32_t expert, std::uint32_t experts,
                                                      std::uint32_t ranks) {
  return static_cast<std::uint32_t>(((std::uint64_t{expert} + 1) * ranks - 1) / experts);
}

/// One term of a check (a step of SplitMix64), below kCombineIncomplete.
MK_HOST_DEVICE constexpr std::uint64_t combine_hash(std::uint64_t number) {
  std::uint64_t hash = (number + 1) * 0x9e3779b97f4a7c15ull;
  hash = (hash ^ hash >> 30) * 0xbf58476d1ce4e5b9ull;
  hash = (hash ^ hash >> 27) * 0x94d049bb133111ebull;
  return (hash ^ hash >> 31) & ~kCombineIncomplete;
}

/// Of one rank, over what its caller gave it.
class RowIndex {
 public:
  /// The tokens of a class are computed in so many steps.
  static constexpr std::uint32_t kSteps = 16;

  /// `rows` are grouped by expert as `offsets` says. The caller has checked them.
  MK_HOST_DEVICE RowIndex(const CombineGeometry& plan, const World& world, const MoeRow* rows,
                          const std::uint32_t* offsets)
      : plan_(plan),
        world_(world),
        rows_(rows),
        offsets_(offsets),
        experts_(experts_of(plan.shape.experts, world)) {}

  MK_HOST_DEVICE const MoeRow& row(std::uint32_t index) const { return rows_[index]; }
  /// This rank's.
  MK_HOST_DEVICE const ShardRange& experts() const { return experts_; }

  /// Calls visit(number, tile) for this rank's row tiles in their order, without their urgency:
  /// each expert's rows in tiles of tile_m, the last one of what is left. Answers how many there
  /// are.
  template <class Visit>
  MK_HOST_DEVICE std::uint32_t for_each_tile(Visit&& visit) const {
    std::uint32_t number = 0;
    for (std::uint32_t expert = 0; expert < experts_.count; ++expert) {
      const std::uint32_t end = offsets_[expert + 1];
      for (std::uint32_t row = offsets_[expert]; row < end; row += plan_.tile_m) {
        CombineTile tile;
        tile.expert = expert;
        tile.row = row;
        tile.rows = end - row < plan_.tile_m ? end - row : plan_.tile_m;
        visit(number++, tile);
      }
    }
    return number;
  }

  /// Which rows are computed first: those of the next node's tokens, then of the one after that,
  /// and so on, this node's last. Of one node in the order of the tokens.
  MK_HOST_DEVICE std::uint32_t urgency_of(const MoeRow& row) const {
    const std::uint32_t node = row.rank / plan_.locals;
    const std::uint32_t after = node + plan_.nodes - world_.node - 1;
    const std::uint32_t position = after < plan_.nodes ? after : after - plan_.nodes;
    const auto step =
        static_cast<std::uint32_t>(std::uint64_t{row.token} * kSteps / plan_.shape.tokens_max);
    return position * kSteps + step;
  }

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

  /// `order`: the tiles by urgency, then by number.
  MK_HOST_DEVICE void arrange(const CombineTile* tiles, std::uint32_t count,
                              std::uint32_t* order) const {
    std::uint32_t next[shm::kNodesMax * kSteps + 1] = {};
    for (std::uint32_t i = 0; i < count; ++i) ++next[tiles[i].urgency + 1];
    const std::uint32_t keys = plan_.nodes * kSteps;
    for (std::uint32_t i = 0; i < keys; ++i) next[i + 1] += next[i];
    for (std::uint32_t i = 0; i < count; ++i) order[next[tiles[i].urgency]++] = i;
  }

  /// The first row that no token can have: of no rank, beyond tokens_max, or of no slot. `count`:
  /// none.
  MK_HOST_DEVICE std::uint32_t first_impossible_row(std::uint32_t count) const {
    const std::uint32_t ranks = plan_.nodes * plan_.locals;
    for (std::uint32_t i = 0; i < count; ++i) {
      const MoeRow& row = rows_[i];
      if (row.rank >= ranks || row.token >= plan_.shape.tokens_max || row.slot >= plan_.shape.top_k)
        return i;
    }
    return count;
  }

 private:
  CombineGeometry plan_;
  World world_;
  const MoeRow* rows_;
  const std::uint32_t* offsets_;
  ShardRange experts_;
};

}  // namespace mk::kernels
