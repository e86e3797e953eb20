/// \file
/// From the routing tables of all ranks to what one rank computes. It says which tokens go to its
/// experts, where each stands in the output, and which tiles of rows are computed when. Plain index
/// arithmetic over arrays, for host and device, cut into pieces that blocks do side by side:
///
///     count(part)      every part of a table, in any order    how many rows for each expert
///     arrange()        once, after all parts are counted      offsets and row tiles
///     fill(part)       every part, after arrange              where each row comes from
///
/// Each piece may be done by several **lanes** together (a GPU's threads): each has a run of a
/// part's slots, then experts of its own. What they make does not depend on how many they are.
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
#include "kernels/gather/schedule.h"
#include "kernels/ops/moe/lanes.h"
#include "kernels/ops/moe/routing_shape.h"
#include "kernels/ops/moe/routing_types.h"
#include "shm/platform.h"

namespace mk::kernels {

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
        experts_(experts_of(shape.experts, shape.world)),
        width_(shape.experts_here_max() + 1) {}

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
    std::uint32_t* const fault = counts + (width_ - 1);
    if (lanes.index == 0) *fault = RoutingFault::kNone;
    if constexpr (is_alone<Lanes>()) {
      for (std::uint32_t e = 0; e < experts_.count; ++e) counts[e] = 0;
      for_each_slot(part, table, [&](std::uint32_t expert, std::uint32_t, std::uint32_t) {
        if (expert < experts_.count) ++counts[expert];
      });
    } else {
      const LaneScratch of_lanes(lanes, experts_.count);
      of_lanes.for_rounds([&](std::uint32_t first, std::uint32_t end) {
        count_run(part, table, lanes, of_lanes, first, end);
        of_lanes.for_own(first, end, [&](std::uint32_t expert) {
          std::uint32_t sum = 0;
          for (std::uint32_t lane = 0; lane < lanes.count; ++lane)
            sum += *of_lanes.word(expert - first, lane);
          counts[expert] = sum;
        });
      });
    }
    lanes.sync();
    for_run(part, table, lanes,
            [&](std::uint32_t i, std::int32_t id, float weight, std::uint32_t, std::uint32_t) {
              const bool some = id >= 0 && static_cast<std::uint32_t>(id) < shape_.experts;
              if (id != -1 && (!some || weight != weight)) lanes.least(fault, i);
            });
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
    if constexpr (is_alone<Lanes>()) {
      for_each_slot(
          part, table, [&](std::uint32_t expert, std::uint32_t token, std::uint32_t slot) {
            if (expert >= experts_.count) return;
            const float weight = table.weights[std::uint64_t{token} * table.stride + slot];
            arrays_.rows[next[expert]++] = {rank, token, slot, weight};
          });
    } else {
      const LaneScratch of_lanes(lanes, experts_.count);
      of_lanes.for_rounds([&](std::uint32_t first, std::uint32_t end) {
        count_run(part, table, lanes, of_lanes, first, end);
        // Where each lane's rows of each expert begin.
        of_lanes.for_own(first, end, [&](std::uint32_t expert) {
          make_starts({of_lanes.word(expert - first, 0)}, {0, lanes.count}, next[expert]);
        });
        lanes.sync();
        for_run(part, table, lanes,
                [&](std::uint32_t, std::int32_t id, float weight, std::uint32_t token,
                    std::uint32_t slot) {
                  const std::uint32_t its = own_expert(id) - first;
                  if (its >= end - first) return;
                  arrays_.rows[(*of_lanes.word(its, lanes.index))++] = {rank, token, slot, weight};
                });
      });
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
    return arrays_.counts + std::uint64_t{part} * width_;
  }
  /// Of the key's tiles by expert; key keys(): of the packed rows. One key's words follow
  /// another's.
  MK_HOST_DEVICE std::uint32_t* places_of(std::uint32_t key) const {
    return arrays_.places + std::uint64_t{key} * experts_.count;
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
  /// Counted from this rank's first; of another rank, or of none: beyond its last.
  MK_HOST_DEVICE std::uint32_t own_expert(std::int32_t id) const {
    return static_cast<std::uint32_t>(id) - experts_.first;  // wraps
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
        visit(own_expert(batch[i]), its_token, its_slot);
        if (++its_slot == shape_.top_k) {
          its_slot = 0;
          ++its_token;
        }
      }
    }
  }

  // --- By several lanes ---

  /// Calls visit(i, id, weight, token, slot) for the part's slots that are the lane's: the i-th of
  /// them.
  template <class Lanes, class Visit>
  MK_HOST_DEVICE void for_run(std::uint32_t part, const RoutingTable& table, const Lanes& lanes,
                              Visit&& visit) const {
    constexpr std::uint32_t kBatch = 8;  // their loads are on their way together
    const std::uint32_t first = first_token(part);
    const std::uint32_t slots = (last_token(part, table) - first) * shape_.top_k;
    const TileRange run = run_of(lanes, slots);
    std::uint32_t token = run.begin / shape_.top_k;
    std::uint32_t slot = run.begin - token * shape_.top_k;
    token += first;
    for (std::uint32_t i = run.begin; i < run.end; i += kBatch) {
      std::int32_t ids[kBatch];
      float weights[kBatch];
      std::uint32_t its_token = token;
      std::uint32_t its_slot = slot;
      for (std::uint32_t b = 0; b < kBatch; ++b) {
        const std::uint64_t at = std::uint64_t{its_token} * table.stride + its_slot;
        ids[b] = i + b < run.end ? table.ids[at] : -1;
        weights[b] = i + b < run.end ? table.weights[at] : 0;
        if (++its_slot == shape_.top_k) {
          its_slot = 0;
          ++its_token;
        }
      }
      for (std::uint32_t b = 0; b < kBatch; ++b) {
        if (i + b < run.end) visit(i + b, ids[b], weights[b], token, slot);
        if (++slot == shape_.top_k) {
          slot = 0;
          ++token;
        }
      }
    }
  }
  /// How many of the lane's slots are of each of experts [first, end), into its words. Ends with a
  /// barrier.
  template <class Lanes>
  MK_HOST_DEVICE void count_run(std::uint32_t part, const RoutingTable& table, const Lanes& lanes,
                                const LaneScratch<Lanes>& of_lanes, std::uint32_t first,
                                std::uint32_t end) const {
    for (std::uint32_t e = 0; e < end - first; ++e) *of_lanes.word(e, lanes.index) = 0;
    for_run(part, table, lanes,
            [&](std::uint32_t, std::int32_t id, float, std::uint32_t, std::uint32_t) {
              const std::uint32_t its = own_expert(id) - first;
              if (its < end - first) ++*of_lanes.word(its, lanes.index);
            });
    lanes.sync();
  }

  /// The first part with a fault, and where that is.
  template <class Lanes>
  MK_HOST_DEVICE void find_fault(const Lanes& lanes) const {
    RoutingFault& fault = arrays_.summary->fault;
    if (lanes.index == 0) fault.rank = RoutingFault::kNone;  // the part, as yet
    lanes.sync();
    for (std::uint32_t part = lanes.index; part < shape_.parts(); part += lanes.count) {
      if (counts_of(part)[width_ - 1] != RoutingFault::kNone) lanes.least(&fault.rank, part);
    }
    lanes.sync();
    if (lanes.index == 0 && fault.any()) {
      const std::uint32_t part = fault.rank;
      const std::uint32_t i = counts_of(part)[width_ - 1];
      fault.rank = rank_of(part);
      fault.token = first_token(part) + i / shape_.top_k;
      fault.slot = i % shape_.top_k;
    }
  }

  /// Offsets from counts; each part's counts become the first output rows of its share. Ends with a
  /// barrier.
  template <class Lanes>
  MK_HOST_DEVICE void arrange_rows(const Lanes& lanes) const {
    const TileRange parts{0, shape_.parts()};
    for (std::uint32_t expert = lanes.index; expert < experts_.count; expert += lanes.count)
      arrays_.offsets[expert] = sum_of({arrays_.counts + expert, width_}, parts);
    lanes.sync();
    const std::uint32_t rows = make_starts_by(lanes, arrays_.offsets, experts_.count);
    if (lanes.index == 0) arrays_.offsets[experts_.count] = rows;
    lanes.sync();
    for (std::uint32_t expert = lanes.index; expert < experts_.count; expert += lanes.count)
      make_starts({arrays_.counts + expert, width_}, parts, arrays_.offsets[expert]);
    lanes.sync();
  }

  /// The first of the expert's rows that come over `hops` hops or more. Between arrange_rows() and
  /// fill().
  MK_HOST_DEVICE std::uint32_t first_row_over(std::uint32_t hops, std::uint32_t expert) const {
    return counts_of(hops * shape_.world.locals * shape_.parts_of_source())[expert];
  }

  /// Where the expert's rows of the key's parts end. Likewise.
  MK_HOST_DEVICE std::uint32_t last_row_of(std::uint32_t key, std::uint32_t expert) const {
    const std::uint32_t next = shape_.first_part_of(key + 1);
    return next < shape_.parts() ? counts_of(next)[expert] : arrays_.offsets[expert + 1];
  }

  /// Calls visit(tile) for every row tile of the expert, by row; their packed rows begin at
  /// `packed_row`. A tile is full, or has the last of its expert's rows, or ends where rows over
  /// more hops begin: at the first such place that leaves it at least half full. So few tiles with
  /// rows from near wait for rows from far.
  template <class Visit>
  MK_HOST_DEVICE void for_each_tile(std::uint32_t expert, std::uint32_t packed_row,
                                    Visit&& visit) const {
    const std::uint32_t end = arrays_.offsets[expert + 1];
    const std::uint32_t nodes = shape_.world.nodes;
    std::uint32_t row = arrays_.offsets[expert];
    if (row == end) return;
    std::uint32_t hops = 1;  // of the next place where rows from farther away begin
    std::uint32_t border = nodes > 1 ? first_row_over(1, expert) : end;
    std::uint32_t key = 0;  // of the tile's last row
    std::uint32_t key_end = last_row_of(0, expert);
    while (row < end) {
      RowTile tile;
      tile.expert = expert;
      tile.row = row;
      tile.rows = end - row < shape_.tile_m ? end - row : shape_.tile_m;
      tile.packed_row = packed_row;
      while (hops < nodes && border < row + shape_.tile_m / 2)
        border = ++hops < nodes ? first_row_over(hops, expert) : end;
      if (hops < nodes && border < row + tile.rows) tile.rows = border - row;
      while (key_end < row + tile.rows) key_end = last_row_of(++key, expert);
      tile.hops = key / shape_.steps;
      tile.step = key % shape_.steps;
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
    const std::uint32_t places = keys * experts_.count;
    for (std::uint32_t i = lanes.index; i < places; i += lanes.count) arrays_.places[i] = 0;
    lanes.sync();
    for (std::uint32_t expert = lanes.index; expert < experts_.count; expert += lanes.count) {
      std::uint32_t packed = 0;
      std::uint32_t its_key = 0;
      std::uint32_t of_key = 0;
      for_each_tile(expert, 0, [&](const RowTile& tile) {
        if (key_of(tile) != its_key) {
          places_of(its_key)[expert] = of_key;
          of_key = 0;
          its_key = key_of(tile);
        }
        ++of_key;
        packed += packed_rows(tile);
      });
      places_of(its_key)[expert] = of_key;
      places_of(keys)[expert] = packed;
    }
    lanes.sync();
    const std::uint32_t tiles = make_starts_by(lanes, arrays_.places, places);
    if (lanes.index == 0) arrays_.summary->tiles = tiles;
    make_starts_by(lanes, arrays_.places + places, experts_.count);
    lanes.sync();
    for (std::uint32_t expert = lanes.index; expert < experts_.count; expert += lanes.count) {
      std::uint32_t its_key = 0;
      std::uint32_t place = places_of(0)[expert];
      for_each_tile(expert, places_of(keys)[expert], [&](const RowTile& tile) {
        if (key_of(tile) != its_key) {
          its_key = key_of(tile);
          place = places_of(its_key)[expert];
        }
        arrays_.tiles[place++] = tile;
      });
    }
  }

  RoutingShape shape_;
  Arrays arrays_;
  GatherSchedule order_;  ///< for the order alone
  ShardRange experts_;
  std::uint32_t width_;  ///< words of a part in Arrays::counts
};

}  // namespace mk::kernels
