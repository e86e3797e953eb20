/// \file
/// One launch of AllGather + GEMM as index arithmetic: whose rows are where in A, which tile of C a
/// rank computes when, and what it needs for it. Compiles for host and device.
///
/// A's m rows are dealt out over all ranks in rank order (shard_of). Each shard is cut into tiles
/// of its own, so a tile needs rows of one rank. A rank computes the tiles of, in this order:
///  1. its own shard;
///  2. the shards of its node's other ranks, one after the other, from the next local rank on;
///  3. for each hop of the ring, the L shards that it brings, which arrive side by side over L
///     rails: the first row of tiles of each, this rank's rail first, then the second of each, ...
/// In each row of tiles, all columns before the next row: whoever waits for a chunk has first
/// computed all that the chunks before it allow.
#pragma once

#include <cstdint>

#include "kernels/ag_gemm/geometry.h"
#include "kernels/comm/shard.h"
#include "kernels/comm/tile_grid.h"
#include "kernels/comm/world.h"
#include "kernels/gather/schedule.h"
#include "shm/platform.h"

namespace mk::kernels {

struct AgGemmTile {
  std::uint32_t origin = 0;  ///< the rank whose rows it needs
  std::uint32_t row = 0;     ///< the first of them, within the origin's shard
  TileRect rect;             ///< its place in C
};

class AgGemmSchedule {
 public:
  /// As the rank of `world` sees it.
  MK_HOST_DEVICE AgGemmSchedule(const AgGemmGeometry& plan, const World& world, std::uint32_t m)
      : plan_(plan), m_(m), gather_(plan.gather, world) {}

  MK_HOST_DEVICE std::uint32_t m() const { return m_; }
  MK_HOST_DEVICE const World& world() const { return gather_.world(); }
  MK_HOST_DEVICE const GatherSchedule& gather() const { return gather_; }

  /// The rows of A, and of C, that rank `origin` brings.
  MK_HOST_DEVICE ShardRange shard(std::uint32_t origin) const {
    return shard_of(m_, world().size(), origin);
  }
  /// Its tiles.
  MK_HOST_DEVICE TileGrid grid(std::uint32_t origin) const {
    return TileGrid(shard(origin).count, plan_.max.n, plan_.tile_m, plan_.tile_n);
  }
  /// Columns of tiles: the same in all shards.
  MK_HOST_DEVICE std::uint32_t tiles_n() const { return div_up(plan_.max.n, plan_.tile_n); }
  /// Rows of tiles of a shard, at most; shards differ by one at most.
  MK_HOST_DEVICE std::uint32_t rounds() const {
    return div_up(shard_rows_max(m_, world().size()), plan_.tile_m);
  }
  /// Rows of tiles of a shard, at least.
  MK_HOST_DEVICE std::uint32_t rounds_everywhere() const {
    return div_up(m_ / world().size(), plan_.tile_m);
  }
  /// All tiles of C.
  MK_HOST_DEVICE std::uint32_t tiles() const {
    std::uint32_t rows = 0;
    for (std::uint32_t rank = 0; rank < world().size(); ++rank) rows += grid(rank).tiles_m();
    return rows * tiles_n();
  }
  /// Tile `column` of row `round` of the origin's tiles.
  MK_HOST_DEVICE AgGemmTile tile(std::uint32_t origin, std::uint32_t round,
                                 std::uint32_t column) const {
    const TileGrid tiles = grid(origin);
    AgGemmTile tile;
    tile.origin = origin;
    tile.row = round * tiles.tile_rows();
    tile.rect.row = shard(origin).first + tile.row;
    tile.rect.column = column * tiles.tile_cols();
    const std::uint32_t rows_left = tiles.rows() - tile.row;
    const std::uint32_t columns_left = tiles.columns() - tile.rect.column;
    tile.rect.rows = rows_left < tiles.tile_rows() ? rows_left : tiles.tile_rows();
    tile.rect.columns = columns_left < tiles.tile_cols() ? columns_left : tiles.tile_cols();
    return tile;
  }
  // What this rank sends and copies in the launch: gather/schedule.h.
  MK_HOST_DEVICE std::uint64_t network_bytes() const {
    return gather_.network_bytes([this](std::uint32_t rank) { return shard(rank).count; });
  }
  MK_HOST_DEVICE std::uint64_t local_bytes() const {
    return gather_.local_bytes([this](std::uint32_t rank) { return shard(rank).count; });
  }
  MK_HOST_DEVICE std::uint32_t commands() const {
    return gather_.commands([this](std::uint32_t rank) { return shard(rank).count; });
  }

 private:
  AgGemmGeometry plan_;
  std::uint32_t m_;
  GatherSchedule gather_;
};

/// Goes through a rank's tiles in the order above.
///
///     for (AgGemmWalk walk(schedule, index); !walk.done(); walk.advance(blocks)) walk.tile()
class AgGemmWalk {
 public:
  /// Begins at the `first`-th tile.
  MK_HOST_DEVICE AgGemmWalk(const AgGemmSchedule& schedule, std::uint32_t first)
      : schedule_(schedule),
        rounds_(schedule.rounds()),
        tiles_n_(schedule.tiles_n()),
        rows_missing_(schedule.rounds_everywhere() != schedule.rounds()) {
    skip_missing_rows();
    advance(first);
  }

  MK_HOST_DEVICE bool done() const { return hops_ == schedule_.world().nodes; }
  MK_HOST_DEVICE AgGemmTile tile() const { return schedule_.tile(origin(), round_, column_); }
  /// Its place in the order's terms: whose, which row of tiles, which column of them.
  MK_HOST_DEVICE std::uint32_t origin() const {
    return schedule_.gather().origin_at(hops_ * schedule_.world().locals + rail_);
  }
  MK_HOST_DEVICE std::uint32_t round() const { return round_; }
  MK_HOST_DEVICE std::uint32_t column() const { return column_; }

  /// Goes on by `steps` tiles.
  MK_HOST_DEVICE void advance(std::uint32_t steps) {
    std::uint64_t column = std::uint64_t{column_} + steps;
    while (column >= tiles_n_ && !done()) {
      column -= tiles_n_;
      next_row();
      skip_missing_rows();
    }
    column_ = static_cast<std::uint32_t>(column);
  }

 private:
  /// On the own node shard by shard, else round by round.
  MK_HOST_DEVICE void next_row() {
    const std::uint32_t locals = schedule_.world().locals;
    std::uint32_t& fast = hops_ == 0 ? round_ : rail_;
    std::uint32_t& slow = hops_ == 0 ? rail_ : round_;
    const std::uint32_t fast_end = hops_ == 0 ? rounds_ : locals;
    const std::uint32_t slow_end = hops_ == 0 ? locals : rounds_;
    if (++fast < fast_end) return;
    fast = 0;
    if (++slow < slow_end) return;
    slow = 0;
    ++hops_;
  }
  /// Shards of one row less may lack the last row of tiles.
  MK_HOST_DEVICE void skip_missing_rows() {
    if (!rows_missing_) return;
    while (!done() && round_ >= schedule_.grid(origin()).tiles_m()) next_row();
  }

  const AgGemmSchedule& schedule_;
  std::uint32_t rounds_;
  std::uint32_t tiles_n_;
  bool rows_missing_;  ///< some shard lacks the last row of tiles
  std::uint32_t hops_ = 0;
  std::uint32_t rail_ = 0;  ///< counted from this rank's own
  std::uint32_t round_ = 0;
  std::uint32_t column_ = 0;
};

}  // namespace mk::kernels
