/// \file
/// From the routing tables of all ranks to what one rank computes. It says which tokens go to its
/// experts, where each stands in the output, and which tiles of rows are computed when. Plain index
/// arithmetic over arrays, for host and device, cut into pieces that blocks do side by side:
///
///     count(part)      every part of a table, in any order    how many rows for each expert
///     arrange()        once, after all parts are counted      offsets and row tiles
///     fill(part)       every part, after arrange              where each row comes from
///
/// Each piece may be done by several **lanes** together (a GPU's threads), each of which has
/// experts of its own. What they make does not depend on how many they are.
///
/// The output's rows are grouped by expert. Within an expert they stand in the order of their
/// expected arrival. First it goes by the nodes that their source's rows cross. Then, because the
/// sources of one node arrive side by side, it goes by part (kPartTokens tokens) of the source,
/// then by source (GatherSchedule::origin_at), token and slot. So the result does not depend on who
/// does which part when, nor on what really arrived first.
///
/// Any skew goes: an expert without rows has no tile, an expert may have all rows.
#pragma once

#include <cstdint>

#include "kernels/comm/shard.h"
#include "kernels/comm/types.h"
#include "kernels/comm/world.h"
#include "kernels/gather/schedule.h"
#include "kernels/ops/moe/routing_types.h"
#include "shm/platform.h"

namespace mk::kernels {

/// The experts of rank `world.rank()`, of `experts` in all; with fewer experts than ranks some have
/// none.
MK_HOST_DEVICE constexpr ShardRange experts_of(std::uint32_t experts, const World& world) {
  return shard_of(experts, world.size(), world.rank());
}

/// Who makes a piece of the plan: lane `index` of `count`, which all call it. `sync` is a barrier
/// between them; `least(word, value)` makes the word the lesser of both, `most` the greater, and
/// `add` their sum, beside others. Here one does it alone.
struct OneLane {
  static constexpr bool kAlone = true;
  static constexpr std::uint32_t index = 0;
  static constexpr std::uint32_t count = 1;
  MK_HOST_DEVICE void sync() const {}
  MK_HOST_DEVICE void least(std::uint32_t* word, std::uint32_t value) const {
    if (value < *word) *word = value;
  }
  MK_HOST_DEVICE void most(std::uint32_t* word, std::uint32_t value) const {
    if (value > *word) *word = value;
  }
  template <class Word>
  MK_HOST_DEVICE void add(Word* word, Word value) const {
    *word += value;
  }
};

/// The numbers a routing plan is made from.
struct RoutingShape {
  World world;
  std::uint32_t experts = 0;  ///< of all ranks
  std::uint32_t top_k = 0;
  std::uint32_t tokens_max = 0;  ///< of one rank
  std::uint32_t rows_max = 0;    ///< output rows there is room for
  std::uint32_t tile_m = 0;      ///< rows of a tile, at most
  std::uint32_t row_pad = 0;     ///< packed tiles have a multiple of this many rows; divides tile_m
  /// The sources of one class arrive side by side, each from its first token on; tiles go by so
  /// many steps of that. The more there are, the sooner there is work. But tiles of an expert,
  /// which share its weights, are the farther apart.
  std::uint32_t steps = 16;

  /// Tokens of one part of a routing table.
  static constexpr std::uint32_t kPartTokens = 256;

  MK_HOST_DEVICE constexpr std::uint32_t parts_of_source() const {
    return div_up(tokens_max, kPartTokens);
  }
  /// Parts are numbered in the order of their expected arrival: by the hops of their sources, then
  /// by their place in a table, then by source.
  MK_HOST_DEVICE constexpr std::uint32_t parts() const { return world.size() * parts_of_source(); }
  MK_HOST_DEVICE constexpr std::uint32_t hops_of(std::uint32_t part) const {
    return part / (world.locals * parts_of_source());
  }
  MK_HOST_DEVICE constexpr std::uint32_t place_of(std::uint32_t part) const {
    return part / world.locals % parts_of_source();
  }
  /// As GatherSchedule::origin_at counts them.
  MK_HOST_DEVICE constexpr std::uint32_t source_of(std::uint32_t part) const {
    return hops_of(part) * world.locals + part % world.locals;
  }
  MK_HOST_DEVICE constexpr std::uint32_t step_of(std::uint32_t part) const {
    return static_cast<std::uint32_t>(std::uint64_t{place_of(part)} * steps / parts_of_source());
  }
  /// Experts of any rank, at most.
  MK_HOST_DEVICE constexpr std::uint32_t experts_here_max() const {
    return shard_rows_max(experts, world.size());
  }
  /// Of each expert's tiles only the last may be less than half full.
  MK_HOST_DEVICE constexpr std::uint64_t tiles_max() const {
    return rows_max / (tile_m / 2) + std::uint64_t{experts_here_max()};
  }
  MK_HOST_DEVICE constexpr std::uint64_t packed_rows_max() const {
    return rows_max + tiles_max() * (row_pad - 1);
  }
  /// Tiles are computed by class, and by step within it: these are their keys.
  MK_HOST_DEVICE constexpr std::uint32_t keys() const { return world.nodes * steps; }
  /// Words of Arrays::counts: a part's counts, and its first fault.
  MK_HOST_DEVICE constexpr std::uint64_t count_words() const {
    return std::uint64_t{parts()} * (experts_here_max() + 1);
  }
  /// Words of Arrays::places: for each key, and for the packed rows, one of each expert and a sum.
  MK_HOST_DEVICE constexpr std::uint64_t place_words() const {
    return (std::uint64_t{keys()} + 1) * (experts_here_max() + 1);
  }
};

/// One rank's plan of one launch, over memory that someone else lays out:
class RoutingPlan {
 public:
  struct Arrays {
    std::uint32_t* counts = nullptr;   ///< [parts][experts_here_max + 1]
    std::uint32_t* places = nullptr;   ///< [keys + 1][experts_here_max + 1]
    std::uint32_t* offsets = nullptr;  ///< [experts_here_max + 1]
    RowTile* tiles = nullptr;          ///< [tiles_max]
    MoeRow* rows = nullptr;            ///< [rows_max]
    PlanSummary* summary = nullptr;
  };

  MK_HOST_DEVICE RoutingPlan(const RoutingShape& shape, const Arrays& arrays)
      : shape_(shape),
        arrays_(arrays),
        order_(GatherGeometry{}, shape.world),
        experts_(experts_of(shape.experts, shape.world)) {}

  MK_HOST_DEVICE const RoutingShape& shape() const { return shape_; }
  /// This rank's.
  MK_HOST_DEVICE const ShardRange& experts() const { return experts_; }

  /// The rank whose table the part belongs to.
  MK_HOST_DEVICE std::uint32_t rank_of(std::uint32_t part) const {
    return order_.origin_at(shape_.source_of(part));
  }

  /// `table` is the one of rank_of(part).
  template <class Lanes = OneLane>
  MK_HOST_DEVICE void count(std::uint32_t part, const RoutingTable& table,
                            const Lanes& lanes = {}) const {
    std::uint32_t* const counts = counts_of(part);
    std::uint32_t* const fault = counts + shape_.experts_here_max();
    if (lanes.index == 0) *fault = RoutingFault::kNone;
    if constexpr (is_alone<Lanes>()) {
      for (std::uint32_t e = 0; e < experts_.count; ++e) counts[e] = 0;
      for_each_slot(part, table, [&](std::uint32_t expert, std::uint32_t, std::uint32_t) {
        if (expert < experts_.count) ++counts[expert];
      });
    } else {
      // Lanes go on together: none may wait for memory when it finds a row.
      for (std::uint32_t own = lanes.index; own < experts_.count; own += lanes.count) {
        std::uint32_t count = 0;
        for_each_slot(part, table, [&](std::uint32_t expert, std::uint32_t, std::uint32_t) {
          count += expert == own ? 1 : 0;
        });
        counts[own] = count;
      }
    }
    lanes.sync();
    const std::uint32_t first = first_token(part);
    const std::uint32_t slots = (last_token(part, table) - first) * shape_.top_k;
    for (std::uint32_t i = lanes.index; i < slots; i += lanes.count) {
      const std::uint64_t at = place_in_table(first, i, table);
      const std::int32_t id = table.ids[at];
      const float weight = table.weights[at];
      const bool some = id >= 0 && static_cast<std::uint32_t>(id) < shape_.experts;
      if (id != -1 && (!some || weight != weight)) lanes.least(fault, i);
    }
  }

  /// Makes offsets and tiles from the counts, and the counts into what fill() needs. With more than
  /// `capacity` (at most rows_max) rows, or with a fault in a table, it only says so: then nothing
  /// else may be done. Either way the last offset is beyond the capacity, as it never is else.
  template <class Lanes = OneLane>
  MK_HOST_DEVICE void arrange(std::uint32_t capacity, const Lanes& lanes = {}) const {
    PlanSummary& summary = *arrays_.summary;
    find_fault(lanes);
    arrange_rows(lanes);
    if (lanes.index == 0) {
      summary.rows = arrays_.offsets[experts_.count];
      summary.tiles = 0;
      summary.fits = summary.rows <= capacity && !summary.fault.any() ? 1u : 0u;
    }
    lanes.sync();
    if (summary.fits != 0) {
      arrange_tiles(lanes);
    } else if (lanes.index == 0 && summary.fault.any()) {
      arrays_.offsets[experts_.count] = kNoRows;
    }
  }

  /// After arrange() has found a fault: what the table of its rank says there.
  MK_HOST_DEVICE void complete_fault(const RoutingTable& table) const {
    RoutingFault& fault = arrays_.summary->fault;
    fault.id = table.ids[std::uint64_t{fault.token} * table.stride + fault.slot];
  }

  /// `table` is the one of rank_of(part).
  template <class Lanes = OneLane>
  MK_HOST_DEVICE void fill(std::uint32_t part, const RoutingTable& table,
                           const Lanes& lanes = {}) const {
    std::uint32_t* const next = counts_of(part);
    const std::uint32_t rank = rank_of(part);
    const auto weight_of = [&](std::uint32_t token, std::uint32_t slot) {
      return table.weights[std::uint64_t{token} * table.stride + slot];
    };
    if constexpr (is_alone<Lanes>()) {
      for_each_slot(part, table,
                    [&](std::uint32_t expert, std::uint32_t token, std::uint32_t slot) {
                      if (expert >= experts_.count) return;
                      arrays_.rows[next[expert]++] = {rank, token, slot, weight_of(token, slot)};
                    });
    } else {
      for (std::uint32_t own = lanes.index; own < experts_.count; own += lanes.count) {
        const std::uint32_t first = next[own];
        std::uint32_t row = first;
        for_each_slot(part, table,
                      [&](std::uint32_t expert, std::uint32_t token, std::uint32_t slot) {
                        if (expert == own) arrays_.rows[row++] = {rank, token, slot, 0};
                      });
        constexpr std::uint32_t kBatch = 8;  // their loads are on their way together
        for (std::uint32_t begin = first; begin < row; begin += kBatch) {
          float weights[kBatch];
          for (std::uint32_t i = 0; i < kBatch; ++i) {
            const MoeRow& its = arrays_.rows[begin + i < row ? begin + i : begin];
            weights[i] = weight_of(its.token, its.slot);
          }
          for (std::uint32_t i = 0; i < kBatch; ++i)
            if (begin + i < row) arrays_.rows[begin + i].weight = weights[i];
        }
      }
    }
  }

  // --- The result ---

  MK_HOST_DEVICE const PlanSummary& summary() const { return *arrays_.summary; }
  static constexpr std::uint32_t kNoRows = 0xffffffff;  ///< in its place, after a fault
  /// offsets()[e] is the first row of this rank's expert e, offsets()[experts().count] the number
  /// of rows.
  MK_HOST_DEVICE const std::uint32_t* offsets() const { return arrays_.offsets; }
  /// summary().tiles of them in the order in which they are computed: by class, step, expert, row.
  /// Class 0 needs only this node's tokens; class d waits for those of a node d hops away.
  MK_HOST_DEVICE const RowTile* tiles() const { return arrays_.tiles; }
  MK_HOST_DEVICE const MoeRow* rows() const { return arrays_.rows; }
  /// Of the packed tile.
  MK_HOST_DEVICE std::uint32_t packed_rows(const RowTile& tile) const {
    return static_cast<std::uint32_t>(round_up_to(tile.rows, shape_.row_pad));
  }

 private:
  MK_HOST_DEVICE std::uint32_t* counts_of(std::uint32_t part) const {
    return arrays_.counts + std::uint64_t{part} * (shape_.experts_here_max() + 1);
  }
  /// Of the key's tiles by expert, then of all; key keys(): of the packed rows.
  MK_HOST_DEVICE std::uint32_t* places_of(std::uint32_t key) const {
    return arrays_.places + std::uint64_t{key} * (shape_.experts_here_max() + 1);
  }

  // --- A part's tokens ---

  MK_HOST_DEVICE std::uint32_t first_token(std::uint32_t part) const {
    return shape_.place_of(part) * RoutingShape::kPartTokens;
  }
  /// Not the first one's predecessor: a part may be empty.
  MK_HOST_DEVICE std::uint32_t last_token(std::uint32_t part, const RoutingTable& table) const {
    const std::uint32_t first = first_token(part);
    const std::uint32_t end = first + RoutingShape::kPartTokens;
    return table.tokens >= end ? end : table.tokens > first ? table.tokens : first;
  }
  /// Of slot `i` of those of the tokens from `first` on.
  MK_HOST_DEVICE std::uint64_t place_in_table(std::uint32_t first, std::uint32_t i,
                                              const RoutingTable& table) const {
    const std::uint32_t token = i / shape_.top_k;
    return std::uint64_t{first + token} * table.stride + (i - token * shape_.top_k);
  }

  template <class Lanes>
  MK_HOST_DEVICE static constexpr bool is_alone() {
    return requires { Lanes::kAlone; };
  }
  /// Calls visit(expert, token, slot) for the part's slots. Experts are counted from this rank's
  /// first; those of other ranks, and none, are beyond its last.
  template <class Visit>
  MK_HOST_DEVICE void for_each_slot(std::uint32_t part, const RoutingTable& table,
                                    Visit&& visit) const {
    constexpr std::uint32_t kBatch = 32;  // their loads are on their way together
    const std::uint32_t first = first_token(part);
    const std::uint32_t slots = (last_token(part, table) - first) * shape_.top_k;
    if (slots == 0) return;
    std::uint32_t slot = 0;  // of the next id
    std::uint32_t its_token = first;
    std::uint32_t its_slot = 0;
    const std::int32_t* ids = table.ids + std::uint64_t{first} * table.stride;
    for (std::uint32_t begin = 0; begin < slots; begin += kBatch) {
      std::int32_t batch[kBatch];
      for (std::uint32_t i = 0; i < kBatch; ++i) {
        batch[i] = begin + i < slots ? ids[slot] : -1;
        if (++slot == shape_.top_k) {
          slot = 0;
          ids += table.stride;
        }
      }
      for (std::uint32_t i = 0; i < kBatch; ++i) {
        // Wraps for -1 and for experts before this rank's first.
        const std::uint32_t expert = static_cast<std::uint32_t>(batch[i]) - experts_.first;
        visit(expert, its_token, its_slot);
        if (++its_slot == shape_.top_k) {
          its_slot = 0;
          ++its_token;
        }
      }
    }
  }

  /// The first part with a fault, and where that is.
  template <class Lanes>
  MK_HOST_DEVICE void find_fault(const Lanes& lanes) const {
    RoutingFault& fault = arrays_.summary->fault;
    if (lanes.index == 0) fault.rank = RoutingFault::kNone;  // the part, as yet
    lanes.sync();
    for (std::uint32_t part = lanes.index; part < shape_.parts(); part += lanes.count) {
      if (counts_of(part)[shape_.experts_here_max()] != RoutingFault::kNone)
        lanes.least(&fault.rank, part);
    }
    lanes.sync();
    if (lanes.index == 0 && fault.any()) {
      const std::uint32_t part = fault.rank;
      const std::uint32_t i = counts_of(part)[shape_.experts_here_max()];
      fault.rank = rank_of(part);
      fault.token = first_token(part) + i / shape_.top_k;
      fault.slot = i % shape_.top_k;
    }
  }

  /// Makes counts *at(0) .. *at(count - 1), which follow each other from `first` on, into where
  /// each begins; answers where the last one ends.
  template <class At>
  MK_HOST_DEVICE static std::uint32_t make_starts(std::uint32_t count, std::uint32_t first,
                                                  At&& at) {
    constexpr std::uint32_t kBatch = 16;  // their loads are on their way together
    for (std::uint32_t begin = 0; begin < count; begin += kBatch) {
      std::uint32_t counts[kBatch];
      for (std::uint32_t i = 0; i < kBatch; ++i) counts[i] = begin + i < count ? *at(begin + i) : 0;
      for (std::uint32_t i = 0; i < kBatch; ++i) {
        if (begin + i < count) *at(begin + i) = first;
        first += counts[i];
      }
    }
    return first;
  }

  /// Offsets from counts; each part's counts become the first output rows of its share. Ends with a
  /// barrier.
  template <class Lanes>
  MK_HOST_DEVICE void arrange_rows(const Lanes& lanes) const {
    for (std::uint32_t expert = lanes.index; expert < experts_.count; expert += lanes.count) {
      std::uint32_t rows = 0;
      for (std::uint32_t part = 0; part < shape_.parts(); ++part) rows += counts_of(part)[expert];
      arrays_.offsets[expert] = rows;
    }
    lanes.sync();
    if (lanes.index == 0) {
      arrays_.offsets[experts_.count] = make_starts(
          experts_.count, 0, [&](std::uint32_t expert) { return arrays_.offsets + expert; });
    }
    lanes.sync();
    for (std::uint32_t expert = lanes.index; expert < experts_.count; expert += lanes.count) {
      make_starts(shape_.parts(), arrays_.offsets[expert],
                  [&](std::uint32_t part) { return counts_of(part) + expert; });
    }
    lanes.sync();
  }

  /// The first of the expert's rows that come over `hops` hops or more. Between arrange_rows() and
  /// fill().
  MK_HOST_DEVICE std::uint32_t first_row_over(std::uint32_t hops, std::uint32_t expert) const {
    return counts_of(hops * shape_.world.locals * shape_.parts_of_source())[expert];
  }

  /// Where the expert's rows of the part end. Between arrange_rows() and fill().
  MK_HOST_DEVICE std::uint32_t first_row_after(std::uint32_t part, std::uint32_t expert) const {
    return part + 1 < shape_.parts() ? counts_of(part + 1)[expert] : arrays_.offsets[expert + 1];
  }

  /// Calls visit(tile) for every row tile of the expert, by row; their packed rows begin at
  /// `packed_row`. A tile is full, or has the last of its expert's rows, or ends where rows over
  /// more hops begin: at the first such place that leaves it at least half full. So few tiles with
  /// rows from near wait for rows from far.
  template <class Visit>
  MK_HOST_DEVICE void for_each_tile(std::uint32_t expert, std::uint32_t packed_row,
                                    Visit&& visit) const {
    const std::uint32_t end = arrays_.offsets[expert + 1];
    std::uint32_t row = arrays_.offsets[expert];
    std::uint32_t part = 0;  // of the tile's last row
    while (row < end) {
      RowTile tile;
      tile.expert = expert;
      tile.row = row;
      tile.rows = end - row < shape_.tile_m ? end - row : shape_.tile_m;
      tile.packed_row = packed_row;
      for (std::uint32_t hops = 1; hops < shape_.world.nodes; ++hops) {
        const std::uint32_t border = first_row_over(hops, expert);
        if (border >= row + tile.rows) break;
        if (border < row + shape_.tile_m / 2) continue;
        tile.rows = border - row;
        break;
      }
      while (first_row_after(part, expert) < row + tile.rows) ++part;
      tile.hops = shape_.hops_of(part);
      tile.step = shape_.step_of(part);
      row += tile.rows;
      packed_row += packed_rows(tile);
      visit(tile);
    }
  }
  MK_HOST_DEVICE std::uint32_t key_of(const RowTile& tile) const {
    return tile.hops * shape_.steps + tile.step;
  }

  /// By key, expert and row: first how many tiles each expert has of each key, and how many packed
  /// rows; from that, where the first of them goes; then the tiles.
  template <class Lanes>
  MK_HOST_DEVICE void arrange_tiles(const Lanes& lanes) const {
    const std::uint32_t keys = shape_.keys();
    const std::uint32_t sums = shape_.experts_here_max();
    for (std::uint32_t expert = lanes.index; expert < experts_.count; expert += lanes.count) {
      for (std::uint32_t key = 0; key < keys; ++key) places_of(key)[expert] = 0;
      std::uint32_t packed = 0;
      for_each_tile(expert, 0, [&](const RowTile& tile) {
        ++places_of(key_of(tile))[expert];
        packed += packed_rows(tile);
      });
      places_of(keys)[expert] = packed;
    }
    lanes.sync();
    for (std::uint32_t key = lanes.index; key < keys; key += lanes.count) {
      std::uint32_t sum = 0;
      for (std::uint32_t expert = 0; expert < experts_.count; ++expert)
        sum += places_of(key)[expert];
      places_of(key)[sums] = sum;
    }
    lanes.sync();
    if (lanes.index == 0) {
      arrays_.summary->tiles =
          make_starts(keys, 0, [&](std::uint32_t key) { return places_of(key) + sums; });
      places_of(keys)[sums] = 0;
    }
    lanes.sync();
    for (std::uint32_t key = lanes.index; key <= keys; key += lanes.count) {
      make_starts(experts_.count, places_of(key)[sums],
                  [&](std::uint32_t expert) { return places_of(key) + expert; });
    }
    lanes.sync();
    for (std::uint32_t expert = lanes.index; expert < experts_.count; expert += lanes.count) {
      for_each_tile(expert, places_of(keys)[expert], [&](const RowTile& tile) {
        arrays_.tiles[places_of(key_of(tile))[expert]++] = tile;
      });
    }
  }

  RoutingShape shape_;
  Arrays arrays_;
  GatherSchedule order_;  ///< for the order alone
  ShardRange experts_;
};

}  // namespace mk::kernels
