/// \file
/// One launch of AllGather+GEMM as index arithmetic: whose rows are where in A, which tile of C a
/// rank computes when, and what it needs for it. Compiles for host and device.
///
/// A's m rows are dealt out over all ranks in rank order (shard_of). One row of tiles may span all
/// shards, if they have few rows (may_span): it reads B once, and each tile waits for all rows.
/// Else each shard is cut into tiles of its own, so a tile needs rows of one rank. A rank computes
/// the tiles of, in this order:
///  1. its own shard, in bands of kBandTiles rows of tiles;
///  2. the shards of its node's other ranks, from the next local rank on, which arrive side by
///     side: the first row of tiles of each, then the second one of each, ..., so many rows at a
///     time (AgGemmBands); or, where they arrive in turn (Arrival), one shard after the other, each
///     as its own;
///  3. for each hop of the ring, the L shards that it brings over L rails, side by side, this
///     rank's rail first, in the same way.
/// Within such a band of rows of tiles: column by column, in each the band's rows as they arrive. A
/// block waits for a chunk only after it has computed nearly every tile that earlier chunks allow.
/// Tiles in work at one time share rows of A and columns of B.
#pragma once

#include <cstdint>

#include "kernels/comm/shard.h"
#include "kernels/comm/tile_grid.h"
#include "kernels/comm/world.h"
#include "kernels/gather/schedule.h"
#include "kernels/ops/ag_gemm/geometry.h"
#include "shm/platform.h"

namespace mk::kernels {

struct AgGemmTile {
  std::uint32_t origin = 0;  ///< the rank whose rows it needs; this rank, if it spans all shards
  std::uint32_t row = 0;     ///< the first of them, within the origin's shard
  TileRect rect;             ///< its place in C
};

class AgGemmSchedule {
 public:
  AgGemmSchedule() = default;
  /// As the rank of `world` sees it. `spans`: only where it may_span().
  MK_HOST_DEVICE AgGemmSchedule(const AgGemmGeometry& plan, const World& world, std::uint32_t m,
                                bool spans = false)
      : m_(m),
        shards_(m, world.size()),
        small_(spans ? m : shards_.least(), plan.max.n, plan.tile_m, plan.tile_n,
               plan.epilogue.column_step()),
        large_(spans ? m : shards_.most(), plan.max.n, plan.tile_m, plan.tile_n,
               plan.epilogue.column_step()),
        gather_(plan.gather, world),
        spans_(spans) {}

  /// Within a tile that spans all shards each begins at a multiple of so many rows: a GPU's boxes
  /// of rows do.
  static constexpr std::uint32_t kSpanRows = 8;
  /// From one shard's first row to the next one's in a tile that spans all, of m rows.
  MK_HOST_DEVICE static constexpr std::uint32_t span_step(std::uint32_t m, std::uint32_t ranks) {
    return div_up(shard_rows_max(m, ranks), kSpanRows) * kSpanRows;
  }
  /// On one node: each rank has rows, and a tile of `tile_m` rows holds them all.
  MK_HOST_DEVICE static constexpr bool may_span(std::uint32_t nodes, std::uint32_t locals,
                                                std::uint32_t m, std::uint32_t tile_m) {
    return nodes == 1 && locals > 1 && m >= locals && locals * span_step(m, locals) <= tile_m;
  }

  MK_HOST_DEVICE std::uint32_t m() const { return m_; }
  MK_HOST_DEVICE const World& world() const { return gather_.world(); }
  MK_HOST_DEVICE const GatherSchedule& gather() const { return gather_; }
  MK_HOST_DEVICE bool spans() const { return spans_; }
  MK_HOST_DEVICE std::uint32_t span_step() const { return span_step(m_, world().size()); }

  /// The rows of A, and of C, that rank `origin` brings.
  MK_HOST_DEVICE ShardRange shard(std::uint32_t origin) const { return shards_.of(origin); }
  /// Its tiles; if they span all shards, those of all.
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
    if (spans_) return large_.tiles();
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
    tile.rect.row = (spans_ ? 0 : shard(origin).first) + tile.row;
    tile.rect.column = column * tiles.tile_cols();
    const std::uint32_t rows_left = tiles.rows() - tile.row;
    const std::uint32_t columns_left = tiles.columns() - tile.rect.column;
    tile.rect.rows = rows_left < tiles.tile_rows() ? rows_left : tiles.tile_rows();
    tile.rect.columns = columns_left < tiles.tile_cols() ? columns_left : tiles.tile_cols();
    return tile;
  }
  /// Of a tile that spans all shards: the part that needs that rank's rows.
  MK_HOST_DEVICE AgGemmTile part_of(const AgGemmTile& tile, std::uint32_t origin) const {
    const ShardRange rows = shard(origin);
    return {origin, 0, {rows.first, tile.rect.column, rows.count, tile.rect.columns}};
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
  bool spans_ = false;
};

/// How the rows of a node's other ranks arrive at a rank.
enum class Arrival : std::uint8_t {
  kSideBySide,  ///< everybody's at one time
  kSoonInTurn,  ///< rank by rank, and all soon: gather::share_in_turn
  kInTurn,      ///< rank by rank, each shard while those before it are computed
};

/// How many rows of tiles are walked together, column by column: a band. A row of tiles that is
/// walked by itself reads all of B, and so does the next one a little behind it, and the one after
/// that. A B of more than a GPU's L2 cache holds is then read from memory by each of them anew.
/// Rows that are walked together wait for the last of them.
struct AgGemmBands {
  /// So many of the node's shards, its own first, are walked one after the other; 1 at least.
  std::uint32_t whole = 1;
  /// Of the node's other shards, and of those that a hop brings: so many of their rows of tiles in
  /// the order in which they arrive. 0: one of each shard.
  std::uint32_t near = 0;
  std::uint32_t far = 0;

  /// One of each shard where B is small. Else as many as all their tiles are in work at one time,
  /// of `workers` at a time (nothing is then left for later when the last row comes), kBandTiles at
  /// most: of each shard alike, and one at least. Shards of the node that arrive in turn are walked
  /// so, too. First come those that are there soon, until each worker has had a tile and more. Then
  /// come kBandTiles rows of the others together.
  static MK_HOST_DEVICE AgGemmBands of(const AgGemmSchedule& schedule, Arrival arrival,
                                       std::uint32_t workers) {
    AgGemmBands bands;
    const std::uint32_t locals = schedule.world().locals;
    if (arrival == Arrival::kInTurn) bands.whole = locals;
    if (arrival == Arrival::kSoonInTurn) bands.whole = soon_in_turn(schedule, workers);
    if (schedule.b_bytes() < kLargeB) return bands;
    const std::uint32_t turn = workers / schedule.tiles_n();
    const std::uint32_t rows = turn < TileGrid::kBandTiles ? turn : TileGrid::kBandTiles;
    const auto of_each = [](std::uint32_t most, std::uint32_t shards) {
      return shards == 0 || most < shards ? 0u : most / shards * shards;
    };
    bands.far = of_each(rows, locals);
    bands.near = of_each(arrival == Arrival::kSideBySide ? rows : TileGrid::kBandTiles,
                         locals - bands.whole);
    return bands;
  }
  static constexpr std::uint64_t kLargeB = 8 << 20;

  /// A shard that is walked beside others.
  struct Place {
    std::uint32_t hops;    ///< from this rank's node
    std::uint32_t shard;   ///< in the order in which the hop's shards arrive, those walked so
    std::uint32_t shards;  ///< how many these are
  };
  /// Rows of tiles in a band of the hop's shards.
  MK_HOST_DEVICE std::uint32_t rows(const Place& at) const {
    const std::uint32_t rows = at.hops == 0 ? near : far;
    return rows == 0 ? at.shards : rows;
  }
  /// Of row `round` of such a shard's tiles: behind the last of its rows in the same band (which
  /// the shard may not have).
  MK_HOST_DEVICE std::uint32_t end_of_band(const Place& at, std::uint32_t round) const {
    const std::uint32_t band = rows(at);
    const std::uint32_t end = ((round * at.shards + at.shard) / band + 1) * band;
    return (end - at.shard + at.shards - 1) / at.shards;
  }
  /// Where `origin`'s shard is walked. It is none of the whole ones.
  MK_HOST_DEVICE Place place(const GatherSchedule& gather, std::uint32_t origin) const {
    const World& world = gather.world();
    Place at;
    at.hops = gather.hops_from(gather.node_of(origin));
    const std::uint32_t first = at.hops == 0 ? whole : 0;
    const std::uint32_t rail = gather.rail_of(origin);
    at.shard = (rail < world.local ? rail + world.locals : rail) - world.local - first;
    at.shards = world.locals - first;
    return at;
  }

 private:
  /// Shards that are walked as they arrive, where all are there soon.
  static MK_HOST_DEVICE std::uint32_t soon_in_turn(const AgGemmSchedule& schedule,
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
    begin_shards();
    next_band();
    advance(first);
  }

  MK_HOST_DEVICE bool done() const { return hops_ == schedule_.world().nodes; }
  MK_HOST_DEVICE AgGemmTile tile() const { return schedule_.tile(origin(), round(), column()); }

  // The tile's place in the order's terms: whose, which row of tiles, which column of them.
  MK_HOST_DEVICE std::uint32_t origin() const {
    return is_whole() ? origin_of(whole_at_) : origin_of(rail());
  }
  MK_HOST_DEVICE std::uint32_t round() const { return (first_ + index_ % members_) / shards_; }
  MK_HOST_DEVICE std::uint32_t column() const { return index_ / members_; }

  /// Goes on by `steps` tiles.
  MK_HOST_DEVICE void advance(std::uint32_t steps) {
    std::uint64_t index = std::uint64_t{index_} + steps;
    while (!done() && index >= members_ * tiles_n_) {
      index -= members_ * tiles_n_;
      next_band();
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
    const std::uint32_t row = first_ + index_ % members_;
    const std::uint32_t round = row / shards_;
    std::uint32_t skip = row - round * shards_;
    std::uint32_t rail = first_rail() + skip;
    if (!rows_missing_) return rail;
    for (rail = first_rail(); !has_round(rail, round) || skip-- != 0; ++rail) {
    }
    return rail;
  }
  /// Where the shards come by whose rows the walk goes.
  MK_HOST_DEVICE void begin_shards() {
    first_ = 0;
    if (is_whole()) {
      shards_ = 1;
      rows_ = schedule_.grid(origin_of(whole_at_)).tiles_m();
      return;
    }
    const std::uint32_t locals = schedule_.world().locals;
    shards_ = locals - first_rail();
    rows_ = schedule_.rounds() * shards_;
    if (!rows_missing_) return;
    // Some have no last one.
    for (std::uint32_t rail = first_rail(); rail < locals; ++rail)
      rows_ -= has_round(rail, schedule_.rounds() - 1) ? 0 : 1;
  }
  /// The next band that has tiles.
  MK_HOST_DEVICE void next_band() {
    first_ += members_;
    if (schedule_.spans() && first_ == rows_) hops_ = schedule_.world().nodes;
    if (done()) return;
    while (first_ == rows_) {
      // After the last whole shard the hop's others come, if there are any.
      if (!is_whole() || (++whole_at_ == bands_.whole && bands_.whole == schedule_.world().locals))
        ++hops_;
      if (done()) return;
      begin_shards();
    }
    const std::uint32_t most = is_whole() ? TileGrid::kBandTiles : bands_.rows({hops_, 0, shards_});
    const std::uint32_t left = rows_ - first_;
    members_ = left < most ? left : most;
  }

  const AgGemmSchedule& schedule_;
  const AgGemmBands bands_;
  std::uint32_t tiles_n_;
  bool rows_missing_;           ///< some shard lacks the last row of tiles
  std::uint32_t whole_at_ = 0;  ///< at which of them
  std::uint32_t hops_ = 0;
  std::uint32_t shards_ = 1;   ///< that it goes by side by side
  std::uint32_t rows_ = 0;     ///< of tiles, of all of them: the first of each, the second ...
  std::uint32_t first_ = 0;    ///< of those, the band's first
  std::uint32_t members_ = 0;  ///< how many the band has
  std::uint32_t index_ = 0;    ///< of its tiles
};

}  // namespace mk::kernels
