/// \file
/// One launch of GEMM+ReduceScatter as index arithmetic: which tile when, whose it is, where its
/// bytes lie, which chunk it belongs to. Compiles for host and device; all ranks of a launch
/// compute the same.
///
/// Rank r ends with the rows of its **shard**, shard_of(m, W, r); each shard is a TileGrid of its
/// own, so no tile straddles shards. The local rank of a shard's rail sums the shard on every node:
/// it is the shard's **owner** there.
///
/// **Order.** Whatever goes out far goes first. A rank of node d computes the shards of node d + 1,
/// then those of d + 2, ..., and those of its own node last. Within a node it takes the first tile
/// of each of the L shards, then the second of each, .... Each such group is walked from another
/// start on each local rank, so that no owner receives from everybody at once. (Shards differ by
/// one row of tiles at most: the last groups are of the larger shards only.)
///
/// **Pieces.** What an owner sums at a time is a chunk of a shard. Its pieces are in the order of
/// the nodes above, of each the chunks by their numbers. All but those of its own shard, which come
/// last, go out.
///
/// Network payload of the rank of rail l on node d in one launch, in bytes:
///     sum over the other nodes e of
///         (kBankHeaderBytes + tiles(shard of (e, l)) * its tile_rows * tile_cols * 2)
/// which is about (N - 1) * m * n * 2 / W: of each other node's shards just that of its rail.
#pragma once

#include <cstdint>

#include "kernels/comm/banks.h"
#include "kernels/comm/divisor.h"
#include "kernels/comm/packed_tiles.h"
#include "kernels/comm/shard.h"
#include "kernels/comm/tile_grid.h"
#include "kernels/comm/types.h"
#include "kernels/ops/gemm_rs/geometry.h"
#include "shm/platform.h"

namespace mk::kernels {

class GemmRsSchedule {
 public:
  /// Tile `tile` of the shard of local rank `local` of `node`.
  struct Tile {
    std::uint32_t node = 0;
    std::uint32_t local = 0;
    std::uint32_t tile = 0;
  };
  /// Chunk `chunk` of an owner's shard of `node`.
  struct Piece {
    std::uint32_t node = 0;
    std::uint32_t chunk = 0;
  };

  GemmRsSchedule() = default;
  MK_HOST_DEVICE GemmRsSchedule(const GemmRsGeometry& plan, std::uint32_t m)
      : plan_(plan),
        m_(m),
        world_(plan.nodes * plan.locals),
        locals_(plan.locals),
        shards_(m, world_),
        small_(shards_.least(), plan.max.n, plan.tile_m, plan.tile_n, plan.epilogue.column_step(),
               band_of(plan.locals)),
        large_(shards_.most(), plan.max.n, plan.tile_m, plan.tile_n, plan.epilogue.column_step(),
               band_of(plan.locals)),
        small_per_chunk_(PackedTiles::per_chunk(plan.tile_bytes(small_), plan.chunk_bytes)),
        large_per_chunk_(PackedTiles::per_chunk(plan.tile_bytes(large_), plan.chunk_bytes)) {}

  MK_HOST_DEVICE std::uint32_t m() const { return m_; }

  // --- Shards ---

  /// The rows of C that rank `rank` ends with.
  MK_HOST_DEVICE ShardRange rows(std::uint32_t rank) const { return shards_.of(rank); }
  /// How the shard is cut into tiles; there are two grids in a launch at most.
  MK_HOST_DEVICE const TileGrid& grid(std::uint32_t rank) const {
    return is_large(rank) ? large_ : small_;
  }
  /// Where in C what is made of the product's tile at `rect` goes.
  MK_HOST_DEVICE TileRect result(const TileRect& rect) const {
    return plan_.epilogue.result_of(rect);
  }
  MK_HOST_DEVICE const TileGrid& small_grid() const { return small_; }
  MK_HOST_DEVICE const TileGrid& large_grid() const { return large_; }
  MK_HOST_DEVICE PackedTiles packed(std::uint32_t rank) const {
    const TileGrid& tiles = grid(rank);
    return PackedTiles(tiles.tiles(), plan_.tile_bytes(tiles),
                       is_large(rank) ? large_per_chunk_ : small_per_chunk_);
  }

  // --- A rank's order of tiles ---

  /// All tiles of C: every rank computes its partial of each.
  MK_HOST_DEVICE std::uint32_t tiles() const { return tiles_before(world_); }
  /// The tile that the rank (node, local) computes as its `step`-th, 0 <= step < tiles().
  MK_HOST_DEVICE Tile tile_at(std::uint32_t node, std::uint32_t local, std::uint32_t step) const {
    Tile tile;
    tile.node = node_after(node, 0);
    for (std::uint32_t i = 1; step >= tiles_of_node(tile.node); ++i) {
      step -= tiles_of_node(tile.node);
      tile.node = node_after(node, i);
    }
    // Groups of one tile of each shard, as long as the small ones last.
    const std::uint32_t small = small_.tiles();
    if (step < small * plan_.locals) {
      tile.tile = step / locals_;
      tile.local = (step + local) % locals_;
      return tile;
    }
    step -= small * plan_.locals;
    std::uint32_t large = large_shards(tile.node);
    tile.tile = small + step / large;
    // Of the node's large shards the (step + local)-th, round about.
    std::uint32_t skip = (step + local) % large;
    for (tile.local = 0;; ++tile.local) {
      if (!is_large(tile.node * plan_.locals + tile.local)) continue;
      if (skip-- == 0) return tile;
    }
  }

  // --- An owner's order of pieces ---

  /// The node whose shards come `position`-th on `node`, position < nodes: its own last.
  MK_HOST_DEVICE std::uint32_t node_after(std::uint32_t node, std::uint32_t position) const {
    const std::uint32_t after = node + 1 + position;
    return after < plan_.nodes ? after : after - plan_.nodes;
  }

  /// Of the rank (node, local), with those of its own shard.
  MK_HOST_DEVICE std::uint32_t pieces(std::uint32_t node, std::uint32_t local) const {
    return pieces_sent(node, local) + packed(rank_of(node, local)).chunks();
  }
  /// The first ones: those for other nodes.
  MK_HOST_DEVICE std::uint32_t pieces_sent(std::uint32_t node, std::uint32_t local) const {
    std::uint32_t count = 0;
    for (std::uint32_t i = 0; i + 1 < plan_.nodes; ++i)
      count += packed(rank_of(node_after(node, i), local)).chunks();
    return count;
  }
  MK_HOST_DEVICE Piece piece_at(std::uint32_t node, std::uint32_t local,
                                std::uint32_t index) const {
    for (std::uint32_t i = 0;; ++i) {
      const std::uint32_t to = node_after(node, i);
      const std::uint32_t chunks = packed(rank_of(to, local)).chunks();
      if (index < chunks) return {to, index};
      index -= chunks;
    }
  }
  /// Payload that the rank sends in the launch (the formula above).
  MK_HOST_DEVICE std::uint64_t network_bytes(std::uint32_t node, std::uint32_t local) const {
    std::uint64_t bytes = 0;
    for (std::uint32_t i = 0; i + 1 < plan_.nodes; ++i)
      bytes += packed(rank_of(node_after(node, i), local)).bank_bytes();
    return bytes;
  }

  // --- Places in an owner's workspace, as byte offsets; a shard by its node ---

  /// Where the partial tiles of a local rank lie.
  MK_HOST_DEVICE std::uint64_t slots(std::uint32_t source_local, std::uint32_t node) const {
    return plan_.layout.slots +
           (std::uint64_t{source_local} * plan_.nodes + node) * plan_.layout.region_bytes;
  }
  MK_HOST_DEVICE std::uint64_t kept() const { return plan_.layout.kept; }
  /// On node `at`, of the sums for node `to`.
  MK_HOST_DEVICE std::uint64_t staging_bank(std::uint32_t bank, std::uint32_t at,
                                            std::uint32_t to) const {
    return plan_.layout.staging +
           (bank * (plan_.nodes - 1) + peer_index(at, to)) * plan_.layout.bank_bytes;
  }
  /// The bank on node `at` that node `from` fills.
  MK_HOST_DEVICE std::uint64_t receive_bank(std::uint32_t bank, std::uint32_t at,
                                            std::uint32_t from) const {
    return plan_.layout.receive +
           (bank * (plan_.nodes - 1) + peer_index(at, from)) * plan_.layout.bank_bytes;
  }
  MK_HOST_DEVICE std::uint64_t tile_ready(std::uint32_t source_local, std::uint32_t node,
                                          std::uint32_t tile) const {
    const std::uint64_t shard = std::uint64_t{source_local} * plan_.nodes + node;
    return plan_.layout.tile_ready + (shard * plan_.tiles_max + tile) * 4;
  }
  /// From one source's to the next one's, in words.
  MK_HOST_DEVICE std::uint32_t tile_ready_step() const { return plan_.nodes * plan_.tiles_max; }
  MK_HOST_DEVICE std::uint64_t chunk_reduced(std::uint32_t node, std::uint32_t chunk) const {
    return plan_.layout.chunk_reduced + (std::uint64_t{node} * plan_.chunks_max + chunk) * 4;
  }

  MK_HOST_DEVICE FlagMap flags() const { return plan_.flags(); }

 private:
  MK_HOST_DEVICE std::uint32_t rank_of(std::uint32_t node, std::uint32_t local) const {
    return node * plan_.locals + local;
  }
  /// Rows of tiles of one shard in a band. As a rank goes through the L shards of a node side by
  /// side, the L bands together are about as high as one of a whole matrix.
  MK_HOST_DEVICE static std::uint32_t band_of(std::uint32_t locals) {
    return locals < TileGrid::kBandTiles ? TileGrid::kBandTiles / locals : 1;
  }
  /// Whether the shard has one row more than others.
  MK_HOST_DEVICE bool is_large(std::uint32_t rank) const {
    return !shards_.even() && rows(rank).count != shards_.least();
  }
  /// Large shards of ranks 0 .. ranks - 1: their rows are ranks * small rows and one of each large.
  MK_HOST_DEVICE std::uint32_t large_before(std::uint32_t ranks) const {
    return shards_.even() ? 0 : shards_.rows_before(ranks) - ranks * shards_.least();
  }
  MK_HOST_DEVICE std::uint32_t large_shards(std::uint32_t node) const {
    return large_before((node + 1) * plan_.locals) - large_before(node * plan_.locals);
  }
  MK_HOST_DEVICE std::uint32_t tiles_before(std::uint32_t ranks) const {
    return ranks * small_.tiles() + large_before(ranks) * (large_.tiles() - small_.tiles());
  }
  MK_HOST_DEVICE std::uint32_t tiles_of_node(std::uint32_t node) const {
    return tiles_before((node + 1) * plan_.locals) - tiles_before(node * plan_.locals);
  }

  GemmRsGeometry plan_;
  std::uint32_t m_ = 0;
  std::uint32_t world_ = 1;
  Divisor locals_;
  Shards shards_;
  TileGrid small_;  ///< of a shard of m / W rows
  TileGrid large_;  ///< of a shard with one row more, if there are such
  Divisor small_per_chunk_;
  Divisor large_per_chunk_;
};

}  // namespace mk::kernels
