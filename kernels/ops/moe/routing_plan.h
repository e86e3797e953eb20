/// \file
/// From the routing tables of all ranks to what one rank computes: which tokens go to its experts,
/// where each stands in the output, and which tiles of rows are computed when. Plain index
/// arithmetic over arrays, for host and device, cut into pieces that blocks do side by side:
///
///     count(part)      every part of a table, in any order    how many rows for each expert
///     arrange()        once, after all parts are counted      offsets and row tiles
///     fill(part)       every part, after arrange              where each row comes from
///
/// The output's rows are grouped by expert; within an expert they stand in the order of their
/// expected arrival: by the nodes that their source's rows cross, then, because the sources of one
/// node arrive side by side, by part (kPartTokens tokens) of the source, then by source
/// (GatherSchedule::origin_at), token and slot. So the result does not depend on who does which
/// part when, nor on what really arrived first.
///
/// Any skew goes: an expert without rows has no tile, an expert may have all rows.
#pragma once

#include <cstdint>

#include "kernels/comm/shard.h"
#include "kernels/comm/types.h"
#include "kernels/comm/world.h"
#include "kernels/gather/schedule.h"
#include "shm/limits.h"
#include "shm/platform.h"

namespace mk::kernels {

/// The experts of rank `world.rank()`, of `experts` in all; with fewer experts than ranks some have
/// none.
MK_HOST_DEVICE constexpr ShardRange experts_of(std::uint32_t experts, const World& world) {
  return shard_of(experts, world.size(), world.rank());
}

/// One rank's routing: token t goes to the experts ids[t * stride + slot], 0 <= slot < top_k, where
/// -1 means nowhere, with weights[t * stride + slot].
struct RoutingTable {
  std::uint32_t tokens = 0;
  std::uint32_t stride = 0;
  const std::int32_t* ids = nullptr;
  const float* weights = nullptr;
};

/// Where a row of the output comes from, and with which weight a combine adds it there.
struct MoeRow {
  std::uint32_t rank = 0;   ///< whose token
  std::uint32_t token = 0;  ///< its row there
  std::uint32_t slot = 0;   ///< of its top_k
  float weight = 0;
  friend constexpr bool operator==(const MoeRow&, const MoeRow&) = default;
};
static_assert(sizeof(MoeRow) == 16);

/// A tile's rows: output rows [row, row + rows) of one expert. Packed, it has a multiple of row_pad
/// rows from `packed_row` on, the last of which mean nothing.
struct RowTile {
  std::uint32_t expert = 0;  ///< counted from this rank's first
  std::uint32_t row = 0;
  std::uint32_t rows = 0;
  std::uint32_t packed_row = 0;
  std::uint32_t hops = 0;  ///< of the source that arrives last: the tile's class
  /// Within its class, when the last of its rows is to be expected (RoutingShape::step_of).
  std::uint32_t step = 0;
};

/// What arrange() found.
struct PlanSummary {
  std::uint32_t rows = 0;   ///< of the output; also when they do not fit
  std::uint32_t tiles = 0;  ///< 0 when the rows do not fit
  std::uint32_t fits = 0;
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
  /// The sources of one class arrive side by side, each from its first token on, in so many steps.
  static constexpr std::uint32_t kSteps = 16;
  MK_HOST_DEVICE constexpr std::uint32_t step_of(std::uint32_t part) const {
    return static_cast<std::uint32_t>(std::uint64_t{place_of(part)} * kSteps / parts_of_source());
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
};

/// One rank's plan of one launch, over memory that someone else lays out:
class RoutingPlan {
 public:
  struct Arrays {
    std::uint32_t* counts = nullptr;   ///< [parts][experts_here_max]
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
  MK_HOST_DEVICE void count(std::uint32_t part, const RoutingTable& table) const {
    std::uint32_t* const counts = counts_of(part);
    for (std::uint32_t e = 0; e < experts_.count; ++e) counts[e] = 0;
    for_each_row(part, table,
                 [&](std::uint32_t expert, std::uint32_t, std::uint32_t) { ++counts[expert]; });
  }

  /// Makes offsets and tiles from the counts, and the counts into what fill() needs. With more than
  /// `capacity` (at most rows_max) rows it only says so: then nothing else may be done.
  MK_HOST_DEVICE void arrange(std::uint32_t capacity) const {
    const std::uint32_t rows = arrange_rows();
    *arrays_.summary = {rows, 0, rows <= capacity ? 1u : 0u};
    if (rows <= capacity) arrays_.summary->tiles = arrange_tiles();
  }

  /// `table` is the one of rank_of(part).
  MK_HOST_DEVICE void fill(std::uint32_t part, const RoutingTable& table) const {
    std::uint32_t* const next = counts_of(part);
    const std::uint32_t rank = rank_of(part);
    for_each_row(part, table, [&](std::uint32_t expert, std::uint32_t token, std::uint32_t slot) {
      arrays_.rows[next[expert]++] = {rank, token, slot,
                                      table.weights[std::uint64_t{token} * table.stride + slot]};
    });
  }

  // --- The result ---

  MK_HOST_DEVICE const PlanSummary& summary() const { return *arrays_.summary; }
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
    return arrays_.counts + std::uint64_t{part} * shape_.experts_here_max();
  }

  /// Calls visit(expert, token, slot) for the part's rows that this rank computes.
  template <class Visit>
  MK_HOST_DEVICE void for_each_row(std::uint32_t part, const RoutingTable& table,
                                   Visit&& visit) const {
    const std::uint32_t first = shape_.place_of(part) * RoutingShape::kPartTokens;
    const std::uint32_t last = table.tokens < first + RoutingShape::kPartTokens
                                   ? table.tokens
                                   : first + RoutingShape::kPartTokens;
    for (std::uint32_t token = first; token < last; ++token) {
      const std::int32_t* ids = table.ids + std::uint64_t{token} * table.stride;
      for (std::uint32_t slot = 0; slot < shape_.top_k; ++slot) {
        // Wraps for -1 and for experts before this rank's first.
        const std::uint32_t expert = static_cast<std::uint32_t>(ids[slot]) - experts_.first;
        if (expert < experts_.count) visit(expert, token, slot);
      }
    }
  }

  /// Offsets from counts; each part's counts become the first output rows of its share.
  MK_HOST_DEVICE std::uint32_t arrange_rows() const {
    std::uint32_t rows = 0;
    for (std::uint32_t expert = 0; expert < experts_.count; ++expert) {
      arrays_.offsets[expert] = rows;
      for (std::uint32_t part = 0; part < shape_.parts(); ++part) {
        std::uint32_t& cell = counts_of(part)[expert];
        const std::uint32_t count = cell;
        cell = rows;
        rows += count;
      }
    }
    arrays_.offsets[experts_.count] = rows;
    return rows;
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

  /// Calls visit(tile) for every row tile, by expert and row. A tile is full, or has the last of
  /// its expert's rows, or ends where rows over more hops begin: at the first such place that
  /// leaves it at least half full. So few tiles with rows from near wait for rows from far.
  template <class Visit>
  MK_HOST_DEVICE void for_each_tile(Visit&& visit) const {
    std::uint32_t packed_row = 0;
    for (std::uint32_t expert = 0; expert < experts_.count; ++expert) {
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
  }

  MK_HOST_DEVICE std::uint32_t arrange_tiles() const {
    constexpr std::uint32_t kSteps = RoutingShape::kSteps;
    std::uint32_t next[shm::kNodesMax * kSteps + 1] =
        {};  // by class and step: its next tile's place
    const auto key = [](const RowTile& tile) { return tile.hops * kSteps + tile.step; };
    for_each_tile([&](const RowTile& tile) { ++next[key(tile) + 1]; });
    const std::uint32_t keys = shape_.world.nodes * kSteps;
    for (std::uint32_t i = 0; i < keys; ++i) next[i + 1] += next[i];
    const std::uint32_t tiles = next[keys];
    for_each_tile([&](const RowTile& tile) { arrays_.tiles[next[key(tile)]++] = tile; });
    return tiles;
  }

  RoutingShape shape_;
  Arrays arrays_;
  GatherSchedule order_;  ///< for the order alone
  ShardRange experts_;
};

}  // namespace mk::kernels
