/// \file
/// The compute role as seams of the GEMM core: tiles in the schedule's order, stored as packed
/// tiles at their owner, each shown by its tile_ready flag.
#pragma once

#include <cuda/atomic>

#include "kernels/cuda/gemm_core.cuh"
#include "kernels/gemm_ar/schedule.h"
#include "shm/flag.h"

namespace mk::kernels::cuda {

/// This rank's tiles in the order of gemm_ar/schedule.h; worker w takes every `workers`-th.
/// `Tile::m` is the tile's number. Tiles may be smaller than the core's, and lie anywhere.
class ScheduleOrder {
 public:
  struct Params {
    GemmArSchedule schedule;
    std::uint32_t local;
  };

  __device__ ScheduleOrder(const Params& params, int worker, int workers)
      : params_(params), step_(static_cast<std::uint32_t>(worker)), workers_(workers) {}

  __device__ bool next(Tile* tile) {
    if (step_ >= params_.schedule.tiles()) return false;
    tile->m = static_cast<int>(params_.schedule.tile_at(params_.local, step_));
    tile->n = 0;
    step_ += static_cast<std::uint32_t>(workers_);
    return true;
  }
  __device__ Tile origin(Tile tile) const {
    const TileRect rect = params_.schedule.rect(static_cast<std::uint32_t>(tile.m));
    return {static_cast<int>(rect.row), static_cast<int>(rect.column)};
  }

 private:
  const Params& params_;
  std::uint32_t step_;
  int workers_;
};

/// Stores a tile into this rank's slot at the tile's owner, on this GPU or a peer; one rank alone
/// stores into C. Rows and columns of the core's tile that are not the schedule's tile are clipped
/// by the tensor maps.
template <class Config>
class OwnerStore {
 public:
  struct Params {
    GemmArSchedule schedule;
    std::uint32_t locals;
    std::uint32_t local;
    CUtensorMap out;  ///< [m, n], box 64 x 64
    CUtensorMap
        slots[shm::kLocalRanksMax];  ///< [owned tiles][tile_rows][tile_cols], box 1 x 64 x 64
    std::byte* workspaces[shm::kLocalRanksMax];
    const std::uint32_t* last_epoch;
  };
  static constexpr int kSharedWords = 2;

  __device__ OwnerStore(const Params& params, std::uint32_t* words)
      : params_(params),
        halves_done_(reinterpret_cast<std::uint64_t*>(words)),
        epoch_(*params.last_epoch + 1) {}

  __device__ void put(const Piece& piece) {
    const auto tile = static_cast<std::uint32_t>(piece.m);
    const GemmArSchedule& schedule = params_.schedule;
    if (piece.row >= static_cast<int>(schedule.tile_rows()) ||
        piece.column >= static_cast<int>(schedule.tile_cols()))
      return;
    if (params_.locals == 1) {
      const TileRect rect = schedule.rect(tile);
      cute::SM90_TMA_STORE_2D::copy(&params_.out, piece.bytes,
                                    static_cast<int>(rect.column) + piece.column,
                                    static_cast<int>(rect.row) + piece.row);
    } else {
      cute::SM90_TMA_STORE_3D::copy(&params_.slots[schedule.owner(tile)], piece.bytes, piece.column,
                                    piece.row, static_cast<int>(schedule.owned_index(tile)));
    }
  }

  __device__ void tile_done(int m, int /*n*/, int warpgroup) {
    const auto tile = static_cast<std::uint32_t>(m);
    ptx::bulk_wait<0>();
    // Tiles done, one 32-bit counter per warpgroup in one word: the later of the two for this tile
    // sees the other's count.
    const ::cuda::atomic_ref<std::uint64_t, ::cuda::thread_scope_block> halves_done(*halves_done_);
    const std::uint64_t before =
        halves_done.fetch_add(1ull << (32 * warpgroup), ::cuda::memory_order_acq_rel);
    const auto mine = static_cast<std::uint32_t>(before >> (32 * warpgroup)) + 1;
    const auto other = static_cast<std::uint32_t>(before >> (32 * (1 - warpgroup)));
    if (other < mine) return;
    const GemmArSchedule& schedule = params_.schedule;
    std::byte* flag = params_.workspaces[schedule.owner(tile)] +
                      schedule.tile_ready(params_.local, schedule.owned_index(tile));
    shm::flag_publish(reinterpret_cast<std::uint32_t*>(flag), epoch_);
  }

  __device__ void finish() {}

 private:
  const Params& params_;
  std::uint64_t* halves_done_;
  std::uint32_t epoch_;
};

}  // namespace mk::kernels::cuda
