/// \file
/// One launch of AllGather + GEMM as index arithmetic: whose rows are where in A, which tile of C a
/// rank computes when, and what it needs for it. Compiles for host and device.
///
/// A's m rows are dealt out over all ranks in rank order (shard_of). Each shard is cut into tiles
/// of its own, so a tile needs rows of one rank. A rank computes the tiles of, in this order:
///  1. its own shard, in bands of kBandTiles rows of tiles;
///  2. the shards of its node's other ranks, from the next local rank on, which arrive side by
///  side:
///     the first rows of tiles of each, then the next ones of each, ... (AgGemmBands); or, where
///     they arrive in turn (gather::share_in_turn), one shard after the other, each as its own;
///  3. for each hop of the ring, the L shards that it brings over L rails, side by side, this
///     rank's rail first.
/// Within such a group of rows of tiles: column by column, in each the group's rows as they arrive.
/// Whoever waits for a chunk has first computed nearly all that the chunks before it allow, and
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
  /// Of B, k by n.
  MK_HOST_DEVICE std::uint64_t b_bytes() const {
    return std::uint64_t{large_.columns()} * gather_.geometry().row_bytes;
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

/// How many rows of tiles of each shard are walked together, column by column. A row of tiles that
/// is walked by itself reads all of B, and so does the next one a little behind it, and the one
/// after that: a B of more than a GPU's L2 cache holds is then read from memory by each of them
/// anew. Rows that are walked together wait for the last of them.
struct AgGemmBands {
  /// So many of the node's shards, its own first, are walked one after the other; 1 at least.
  std::uint32_t whole = 1;
  std::uint32_t near = 1;  ///< of each of the node's other shards
  std::uint32_t far = 1;   ///< of each shard that a hop brings

  /// One row where B is small. Else as many as all their tiles are in work at one time, of
  /// `workers` at a time (nothing is then left for later when the last row comes), kBandTiles of
  /// all shards together at most.
  /// `in_turn`: the node's shards arrive one after the other (gather::share_in_turn). They are
  /// walked so, too, until each worker has had a tile and more; by then all of them are there, and
  /// kBandTiles rows of the others are walked together.
  static MK_HOST_DEVICE AgGemmBands of(const AgGemmSchedule& schedule, bool in_turn,
                                       std::uint32_t workers) {
    AgGemmBands bands;
    const std::uint32_t locals = schedule.world().locals;
    if (in_turn) bands.whole = in_turn_of(schedule, workers);
    if (schedule.b_bytes() < kLargeB) return bands;
    const std::uint32_t wave = workers / schedule.tiles_n();
    const std::uint32_t rows = wave < TileGrid::kBandTiles ? wave : TileGrid::kBandTiles;
    if (rows >= locals) bands.far = rows / locals;
    const std::uint32_t others = locals - bands.whole;
    const std::uint32_t rows_near = in_turn ? TileGrid::kBandTiles : rows;
    if (others != 0 && rows_near >= others) bands.near = rows_near / others;
    return bands;
  }
  static constexpr std::uint64_t kLargeB = 8 << 20;

  /// Of a tile of such a shard (of `hops` hops from this rank's node), row `round` of its tiles:
  /// behind the last row of tiles that is walked together with it.
  MK_HOST_DEVICE std::uint32_t end_of_band(std::uint32_t hops, std::uint32_t round) const {
    const std::uint32_t rows = hops == 0 ? near : far;
    return (round / rows + 1) * rows;
  }

 private:
  /// Shards that are walked as they arrive.
  static MK_HOST_DEVICE std::uint32_t in_turn_of(const AgGemmSchedule& schedule,
                                                 std::uint32_t workers) {
    const std::uint32_t tiles = schedule.rounds() * schedule.tiles_n();  // of a shard
    const std::uint32_t whole = 1 + div_up(workers, tiles);
    const std::uint32_t locals = schedule.world().locals;
    return whole < locals ? whole : locals;
  }
};

/// Goes through a rank's tiles in the order above.
///
///     AgGemmWalk walk(schedule, bands, index);
///     for (; !walk.done(); walk.advance(blocks)) walk.tile()
class AgGemmWalk {
 public:
  /// Begins at the `first`-th tile.
  MK_HOST_DEVICE AgGemmWalk(const AgGemmSchedule& schedule, const AgGemmBands& bands,
                            std::uint32_t first)
      : schedule_(schedule),
        bands_(bands),
        tiles_n_(schedule.tiles_n()),
        rows_missing_(schedule.rounds_everywhere() != schedule.rounds()) {
    begin_group();
    if (members_ == 0) next_group();
    advance(first);
  }

  MK_HOST_DEVICE bool done() const { return hops_ == schedule_.world().nodes; }
  MK_HOST_DEVICE AgGemmTile tile() const { return schedule_.tile(origin(), round(), column()); }

  // The tile's place in the order's terms: whose, which row of tiles, which column of them.
  MK_HOST_DEVICE std::uint32_t origin() const {
    return is_whole() ? origin_of(whole_at_) : origin_of(rail());
  }
  MK_HOST_DEVICE std::uint32_t round() const { return round_ + index_ % members_ / shards_; }
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
  MK_HOST_DEVICE bool is_whole() const { return whole_at_ < bands_.whole; }
  /// At hop 0 those are done.
  MK_HOST_DEVICE std::uint32_t first_rail() const { return hops_ == 0 ? bands_.whole : 0; }
  /// Shards of one row less may lack the last row of tiles.
  MK_HOST_DEVICE bool has_round(std::uint32_t rail, std::uint32_t round) const {
    return !rows_missing_ || round < schedule_.grid(origin_of(rail)).tiles_m();
  }
  /// The rail of this index's row of tiles.
  MK_HOST_DEVICE std::uint32_t rail() const {
    const std::uint32_t row = index_ % members_;
    std::uint32_t skip = row % shards_;
    std::uint32_t rail = first_rail() + skip;
    if (!rows_missing_) return rail;
    const std::uint32_t round = round_ + row / shards_;
    for (rail = first_rail(); !has_round(rail, round) || skip-- != 0; ++rail) {
    }
    return rail;
  }
  /// Rows of tiles of the shard that is walked by itself, or of the largest of those side by side.
  MK_HOST_DEVICE std::uint32_t rounds_in_all() const {
    return is_whole() ? schedule_.grid(origin_of(whole_at_)).tiles_m() : schedule_.rounds();
  }
  /// Where round_ is a group's first: how many there are in it, of how many shards.
  MK_HOST_DEVICE void begin_group() {
    const std::uint32_t locals = schedule_.world().locals;
    shards_ = is_whole() ? 1 : locals - first_rail();
    const std::uint32_t most = is_whole()   ? TileGrid::kBandTiles
                               : hops_ == 0 ? bands_.near
                                            : bands_.far;
    const std::uint32_t left = rounds_in_all() - round_;
    rounds_ = left < most ? left : most;
    members_ = rounds_ * shards_;
    if (is_whole() || !rows_missing_) return;
    // Some may have no last one.
    for (std::uint32_t rail = first_rail(); rail < locals; ++rail)
      members_ -= has_round(rail, round_ + rounds_ - 1) ? 0 : 1;
  }
  /// The next group that has tiles.
  MK_HOST_DEVICE void next_group() {
    do {
      round_ += rounds_;
      if (round_ >= rounds_in_all()) {
        round_ = 0;
        // After the last whole shard the hop's others come, if there are any.
        if (!is_whole() ||
            (++whole_at_ == bands_.whole && bands_.whole == schedule_.world().locals))
          ++hops_;
      }
      if (done()) {
        members_ = 0;
      } else {
        begin_group();
      }
    } while (!done() && members_ == 0);
  }

  const AgGemmSchedule& schedule_;
  const AgGemmBands bands_;
  std::uint32_t tiles_n_;
  bool rows_missing_;           ///< some shard lacks the last row of tiles
  std::uint32_t whole_at_ = 0;  ///< at which of them
  std::uint32_t hops_ = 0;
  std::uint32_t round_ = 0;    ///< the group's first row of tiles of each shard
  std::uint32_t rounds_ = 0;   ///< how many of each it has
  std::uint32_t shards_ = 1;   ///< whose rows of tiles it has
  std::uint32_t members_ = 0;  ///< rows of tiles in the group
  std::uint32_t index_ = 0;    ///< within the group
};

}  // namespace mk::kernels
