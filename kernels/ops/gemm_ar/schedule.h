/// \file
/// One launch of GEMM+AllReduce as index arithmetic: which tile when, who owns it, where its
/// bytes lie, which chunk it belongs to. Compiles for host and device; all ranks of a launch
/// compute the same.
///
/// C is cut into tiles, numbered in bands (comm/tile_grid.h). Tile t belongs to local rank t mod L
/// of every node, as its owned tile number t div L: its **owner** sums it and exchanges it with its
/// rail peers. An owner's chunk c is its owned tiles [c*P, (c+1)*P), P = tiles_per_chunk. Ranks
/// compute tiles in the order of their numbers, so all owners' first chunks are complete first.
/// Each group of L tiles (one per owner) is walked from another start on each rank, so that no
/// owner receives from everybody at once.
///
/// Network payload of the rank of rail l in one launch, in bytes:
///     (N - 1) * (kBankHeaderBytes + owned(l) * tile_rows * tile_cols * p)
/// with p bytes for a partial sum (2, or 4 in fp32), which over all rails is about (N - 1) * m * n
/// * p: each node's sum of each element goes once to each other node.
#pragma once

#include <cstdint>

#include "kernels/comm/banks.h"
#include "kernels/comm/divisor.h"
#include "kernels/comm/launch_record.h"
#include "kernels/comm/packed_tiles.h"
#include "kernels/comm/tile_grid.h"
#include "kernels/comm/types.h"
#include "kernels/ops/gemm_ar/geometry.h"
#include "shm/platform.h"

namespace mk::kernels {

class GemmArSchedule {
 public:
  GemmArSchedule() = default;
  MK_HOST_DEVICE GemmArSchedule(const GemmArGeometry& plan, std::uint32_t m)
      : plan_(plan),
        locals_(plan.locals),
        grid_(m, plan.max.n, plan.tile_m, plan.tile_n, plan.epilogue.column_step()),
        tiles_per_chunk_(PackedTiles::per_chunk(plan.tile_bytes(grid_), plan.chunk_bytes)) {}

  MK_HOST_DEVICE const TileGrid& grid() const { return grid_; }
  MK_HOST_DEVICE std::uint32_t m() const { return grid_.rows(); }
  MK_HOST_DEVICE std::uint32_t tiles() const { return grid_.tiles(); }
  /// Size of every packed tile; the last ones of a row or column of tiles use less of it.
  MK_HOST_DEVICE std::uint32_t tile_rows() const { return grid_.tile_rows(); }
  MK_HOST_DEVICE std::uint32_t tile_cols() const { return grid_.tile_cols(); }
  MK_HOST_DEVICE std::uint64_t slot_bytes() const { return plan_.tile_bytes(grid_); }
  MK_HOST_DEVICE std::uint32_t tiles_per_chunk() const { return tiles_per_chunk_.value(); }

  // --- Tiles ---

  /// Where tile `tile` lies in C.
  MK_HOST_DEVICE TileRect rect(std::uint32_t tile) const { return grid_.rect(tile); }

  MK_HOST_DEVICE std::uint32_t owner(std::uint32_t tile) const { return tile % locals_; }
  MK_HOST_DEVICE std::uint32_t owned_index(std::uint32_t tile) const { return tile / locals_; }
  MK_HOST_DEVICE std::uint32_t tile_of(std::uint32_t owner, std::uint32_t owned_index) const {
    return owned_index * plan_.locals + owner;
  }
  /// How many tiles local rank `owner` owns; 0 when there are fewer tiles than local ranks.
  MK_HOST_DEVICE std::uint32_t owned(std::uint32_t owner) const {
    return owner < tiles() ? div_up(tiles() - owner, locals_) : 0;
  }

  /// The tile that local rank `local` computes as its `step`-th, 0 ≤ step < tiles().
  MK_HOST_DEVICE std::uint32_t tile_at(std::uint32_t local, std::uint32_t step) const {
    const std::uint32_t first = step / locals_ * plan_.locals;
    const std::uint32_t left = tiles() - first;
    const std::uint32_t turned = step - first + local;
    return first + (left < plan_.locals ? turned % left : turned % locals_);
  }

  // --- Chunks ---

  /// An owner's tiles, by their owned numbers.
  MK_HOST_DEVICE PackedTiles packed(std::uint32_t owner) const {
    return PackedTiles(owned(owner), slot_bytes(), tiles_per_chunk_);
  }
  /// Chunks of an owner; at least one, which then holds only its bank's header.
  MK_HOST_DEVICE std::uint32_t chunks(std::uint32_t owner) const { return packed(owner).chunks(); }
  MK_HOST_DEVICE std::uint32_t chunk_of(std::uint32_t owned_index) const {
    return owned_index / tiles_per_chunk_;
  }
  MK_HOST_DEVICE TileRange chunk_tiles(std::uint32_t owner, std::uint32_t chunk) const {
    return packed(owner).chunk_tiles(chunk);
  }
  MK_HOST_DEVICE ByteRange chunk_range(std::uint32_t owner, std::uint32_t chunk) const {
    return packed(owner).chunk_range(chunk);
  }
  /// Payload that the rank of this rail sends in the launch (the formula above).
  MK_HOST_DEVICE std::uint64_t network_bytes(std::uint32_t local) const {
    return (plan_.nodes - 1) * packed(local).bank_bytes();
  }

  // --- Places in the workspace, as byte offsets ---

  MK_HOST_DEVICE std::uint64_t slot(std::uint32_t source_local, std::uint32_t owned_index) const {
    return plan_.layout.slots + source_local * plan_.layout.slot_region_bytes +
           owned_index * slot_bytes();
  }
  MK_HOST_DEVICE std::uint64_t slot_in_bank(std::uint32_t owned_index) const {
    return kBankHeaderBytes + owned_index * slot_bytes();
  }
  MK_HOST_DEVICE std::uint64_t staging_bank(std::uint32_t bank) const {
    return plan_.layout.staging + bank * plan_.layout.bank_bytes;
  }
  /// The bank on node `at` that node `from` fills.
  MK_HOST_DEVICE std::uint64_t receive_bank(std::uint32_t bank, std::uint32_t at,
                                            std::uint32_t from) const {
    return plan_.layout.receive +
           (bank * (plan_.nodes - 1) + peer_index(at, from)) * plan_.layout.bank_bytes;
  }
  /// Where in C what is made of the product's tile at `rect` goes, and from where in the workspace
  /// on.
  MK_HOST_DEVICE TileRect result(const TileRect& rect) const {
    return plan_.epilogue.result_of(rect);
  }
  MK_HOST_DEVICE std::uint64_t out(const TileRect& rect) const {
    const TileRect to = result(rect);
    return plan_.layout.out +
           (std::uint64_t{to.row} * plan_.result_columns() + to.column) * kElementBytes;
  }
  MK_HOST_DEVICE std::uint64_t tile_ready(std::uint32_t source_local,
                                          std::uint32_t owned_index) const {
    return plan_.layout.tile_ready +
           (std::uint64_t{source_local} * plan_.tiles_max + owned_index) * 4;
  }
  /// From one source's to the next one's, in words.
  MK_HOST_DEVICE std::uint32_t tile_ready_step() const { return plan_.tiles_max; }
  MK_HOST_DEVICE std::uint64_t chunk_reduced(std::uint32_t chunk) const {
    return plan_.layout.chunk_reduced + std::uint64_t{chunk} * 4;
  }
  MK_HOST_DEVICE std::uint64_t out_ready(std::uint32_t owner, std::uint32_t chunk) const {
    return plan_.layout.out_ready + (std::uint64_t{owner} * plan_.chunks_max + chunk) * 4;
  }

  MK_HOST_DEVICE FlagMap flags() const { return plan_.flags(); }

 private:
  GemmArGeometry plan_;
  Divisor locals_;
  TileGrid grid_;
  Divisor tiles_per_chunk_;
};

}  // namespace mk::kernels
