/// \file
/// One launch of AllGather + GEMM as index arithmetic: whose rows are where in A, which tile of C a
/// rank computes when, and what it needs for it. Compiles for host and device.
///
/// A's m rows are dealt out over all ranks in rank order (shard_of). Each shard is cut into tiles
/// of its own, so a tile needs rows of one rank. A rank computes the tiles of, in this order:
///  1. its own shard, in bands of kBandTiles rows of tiles;
///  2. the shards of its node's other ranks, from the next local rank on, which arrive side by
///  side:
///     the first row of tiles of each, then the second of each, ...; or, where they arrive in turn
///     (gather::share_in_turn), one shard after the other, each as its own;
///  3. for each hop of the ring, the L shards that it brings over L rails, in the same way, this
///     rank's rail first.
/// Within such a group of rows of tiles: column by column, in each the group's rows one after the
/// other. Whoever waits for a chunk has first computed all that the chunks before it allow, and
/// tiles in work at one time share rows of A and columns of B.
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
  AgGemmSchedule() = default;
  /// As the rank of `world` sees it.
  MK_HOST_DEVICE AgGemmSchedule(const AgGemmGeometry& plan, const World& world, std::uint32_t m)
      : m_(m),
        shards_(m, world.size()),
        small_(shards_.least(), plan.max.n, plan.tile_m, plan.tile_n),
        large_(shards_.most(), plan.max.n, plan.tile_m, plan.tile_n),
        gather_(plan.gather, world) {}

  MK_HOST_DEVICE std::uint32_t m() const { return m_; }
  MK_HOST_DEVICE const World& world() const { return gather_.world(); }
  MK_HOST_DEVICE const GatherSchedule& gather() const { return gather_; }

  /// The rows of A, and of C, that rank `origin` brings.
  MK_HOST_DEVICE ShardRange shard(std::uint32_t origin) const { return shards_.of(origin); }
  /// Its tiles.
  MK_HOST_DEVICE const TileGrid& grid(std::uint32_t origin) const {
    return shards_.even() || shard(origin).count == shards_.least() ? small_ : large_;
  }
  MK_HOST_DEVICE const TileGrid& small_grid() const { return small_; }
  MK_HOST_DEVICE const TileGrid& large_grid() const { return large_; }
  /// Columns of tiles: the same in all shards.
  MK_HOST_DEVICE std::uint32_t tiles_n() const { return large_.tiles_n(); }
  /// Rows of tiles of a shard, at most; shards differ by one at most.
  MK_HOST_DEVICE std::uint32_t rounds() const { return large_.tiles_m(); }
  /// Rows of tiles of a shard, at least.
  MK_HOST_DEVICE std::uint32_t rounds_everywhere() const { return small_.tiles_m(); }
  /// All tiles of C.
  MK_HOST_DEVICE std::uint32_t tiles() const {
    std::uint32_t rows = 0;
    for (std::uint32_t rank = 0; rank < world().size(); ++rank) rows += grid(rank).tiles_m();
    return rows * tiles_n();
  }
  /// Tile `column` of row `round` of the origin's tiles.
  MK_HOST_DEVICE AgGemmTile tile(std::uint32_t origin, std::uint32_t round,
                                 std::uint32_t column) const {
    const TileGrid& tiles = grid(origin);
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
  std::uint32_t m_ = 0;
  Shards shards_;
  TileGrid small_;  ///< of a shard of m / W rows
  TileGrid large_;  ///< of a shard with one row more, if there are such
  GatherSchedule gather_;
};

/// Goes through a rank's tiles in the order above.
///
///     for (AgGemmWalk walk(schedule, index); !walk.done(); walk.advance(blocks)) walk.tile()
class AgGemmWalk {
 public:
  /// Begins at the `first`-th tile. `in_turn`: whether the node's shards arrive so.
  MK_HOST_DEVICE AgGemmWalk(const AgGemmSchedule& schedule, std::uint32_t first,
                            bool in_turn = false)
      : schedule_(schedule),
        rounds_(schedule.rounds()),
        tiles_n_(schedule.tiles_n()),
        rows_missing_(schedule.rounds_everywhere() != schedule.rounds()),
        whole_(in_turn ? schedule.world().locals : 1),
        members_(count_members()) {
    if (members_ == 0) next_group();
    advance(first);
  }

  MK_HOST_DEVICE bool done() const { return hops_ == schedule_.world().nodes; }
  MK_HOST_DEVICE AgGemmTile tile() const { return schedule_.tile(origin(), round(), column()); }

  // The tile's place in the order's terms: whose, which row of tiles, which column of them.
  MK_HOST_DEVICE std::uint32_t origin() const {
    return is_whole() ? origin_of(whole_at_) : origin_of(rail());
  }
  MK_HOST_DEVICE std::uint32_t round() const {
    return is_whole() ? round_ + index_ % members_ : round_;
  }
  MK_HOST_DEVICE std::uint32_t column() const { return index_ / members_; }

  /// Goes on by `steps` tiles.
  MK_HOST_DEVICE void advance(std::uint32_t steps) {
    std::uint64_t index = std::uint64_t{index_} + steps;
    while (!done() && index >= members_ * tiles_n_) {
      index -= members_ * tiles_n_;
      next_group();
    }
    index_ = static_cast<std::uint32_t>(index);
  }

 private:
  /// Of the rail that is `rail`-th from this rank's own, at the present hop.
  MK_HOST_DEVICE std::uint32_t origin_of(std::uint32_t rail) const {
    return schedule_.gather().origin_at(hops_ * schedule_.world().locals + rail);
  }
  /// In a shard that is walked by itself: this rank's own, or one that arrives in turn.
  MK_HOST_DEVICE bool is_whole() const { return whole_at_ < whole_; }
  /// At hop 0 those are done.
  MK_HOST_DEVICE std::uint32_t first_rail() const { return hops_ == 0 ? whole_ : 0; }
  /// Shards of one row less may lack the last row of tiles.
  MK_HOST_DEVICE bool has_round(std::uint32_t rail) const {
    return !rows_missing_ || round_ < schedule_.grid(origin_of(rail)).tiles_m();
  }
  /// The rail of this index's row of tiles.
  MK_HOST_DEVICE std::uint32_t rail() const {
    std::uint32_t rail = first_rail() + index_ % members_;
    if (!rows_missing_) return rail;
    std::uint32_t skip = index_ % members_;
    for (rail = first_rail(); !has_round(rail) || skip-- != 0; ++rail) {
    }
    return rail;
  }
  /// Rows of tiles in the group that begins with round_.
  MK_HOST_DEVICE std::uint32_t count_members() const {
    if (is_whole()) {
      const std::uint32_t left = schedule_.grid(origin_of(whole_at_)).tiles_m() - round_;
      return left < TileGrid::kBandTiles ? left : TileGrid::kBandTiles;
    }
    const std::uint32_t locals = schedule_.world().locals;
    if (!rows_missing_) return locals - first_rail();
    std::uint32_t members = 0;
    for (std::uint32_t rail = first_rail(); rail < locals; ++rail) members += has_round(rail);
    return members;
  }
  /// The next group that has tiles.
  MK_HOST_DEVICE void next_group() {
    do {
      if (is_whole()) {
        round_ += members_;
        if (members_ == 0 || round_ >= schedule_.grid(origin_of(whole_at_)).tiles_m()) {
          round_ = 0;
          ++whole_at_;
          if (!is_whole() && whole_ == schedule_.world().locals) ++hops_;
        }
      } else if (++round_ == rounds_) {
        round_ = 0;
        ++hops_;
      }
      members_ = done() ? 0 : count_members();
    } while (!done() && members_ == 0);
  }

  const AgGemmSchedule& schedule_;
  std::uint32_t rounds_;
  std::uint32_t tiles_n_;
  bool rows_missing_;           ///< some shard lacks the last row of tiles
  std::uint32_t whole_;         ///< shards that are walked by themselves
  std::uint32_t whole_at_ = 0;  ///< at which of them
  std::uint32_t hops_ = 0;
  std::uint32_t round_ = 0;    ///< the group's; its first, of the own shard's
  std::uint32_t members_ = 0;  ///< rows of tiles in the group
  std::uint32_t index_ = 0;    ///< within the group
};

}  // namespace mk::kernels
