/// \file
/// The compute role of AllGather + GEMM as seams of the GEMM core: tiles in the schedule's order,
/// each when its rows of A are there, read where they lie, stored into the caller's C.
#pragma once

#include "kernels/ag_gemm/block.h"
#include "kernels/ag_gemm/schedule.h"
#include "kernels/cuda/ag_gemm/launch_arguments.h"
#include "kernels/cuda/block_gate.cuh"
#include "kernels/cuda/gemm_core.cuh"
#include "kernels/cuda/tile_feed.cuh"

namespace mk::kernels::cuda {

/// Which tile, as two numbers: `Tile::m` = origin * rounds + round, `n` the column of tiles.
struct AgGemmTiles {
  AgGemmSchedule schedule;
  Divisor rounds;
  std::uint32_t tiles;

  __device__ AgGemmTile find(Tile tile) const {
    const std::uint32_t origin = static_cast<std::uint32_t>(tile.m) / rounds;
    return schedule.tile(origin, static_cast<std::uint32_t>(tile.m) - origin * rounds.value(),
                         static_cast<std::uint32_t>(tile.n));
  }
};

/// The order of ag_gemm/schedule.h; each tile goes to the block that is free first. Blocks that
/// waited for rows, or shared some, would else be behind to the end.
class AgGemmOrder {
 public:
  struct Params {
    AgGemmTiles tiles;
    AgGemmBands bands;
    std::uint32_t workers;  ///< of those that are there from the start
    std::uint32_t* taken;   ///< DeviceState::tiles_taken
  };
  static constexpr bool kTaken = true;

  __device__ AgGemmOrder(const Params& params, int /*worker*/, int /*workers*/)
      : params_(params), walk_(params.tiles.schedule, params.bands, 0) {}

  __device__ bool next(Tile* tile) {
    std::uint32_t step;
    const bool some = take_step(at_ == kNone, blockIdx.x, params_.workers, params_.taken,
                                params_.tiles.tiles, &step);
    if (!some) return false;
    walk_.advance(at_ == kNone ? step : step - at_);
    at_ = step;
    tile->m = static_cast<int>(walk_.origin() * params_.tiles.rounds.value() + walk_.round());
    tile->n = static_cast<int>(walk_.column());
    return true;
  }
  __device__ Tile origin(Tile tile) const {
    const TileRect rect = params_.tiles.find(tile).rect;
    return {static_cast<int>(rect.row), static_cast<int>(rect.column)};
  }

 private:
  const Params& params_;
  static constexpr std::uint32_t kNone = 0xffffffffu;
  AgGemmWalk walk_;
  std::uint32_t at_ = kNone;  ///< the step that walk_ is at; kNone: the first, and none is taken
};

/// Waits for the tile's rows, and loads them from the caller's shard or from their origin's slot.
class AgGemmGate {
 public:
  struct Params {
    AgGemmTiles tiles;
    World world;
    bool unfused;
    CUtensorMap gathered;  ///< see AgGemmArguments
    WaitsDone waits_done;
    const std::uint32_t* taken;  ///< the order's
    AgGemmBands bands;
    bool in_bands;  ///< a tile waits for all rows of its shard that are walked together with it
  };
  using Shared = BlockGateShared<AgGemmLaunch, AgGemmBlock, WarpGateExecutor>;

  __device__ AgGemmGate(const Params& params, Shared& shared)
      : params_(params), block_(&shared.make_block()), all_(params.unfused) {}

  __device__ int wait(int m, int n, int k_block) {
    if (k_block != 0) {
      // This block's last inputs are there, if nobody gets a tile any more.
      if (!noted_ && all_taken(params_.waits_done.compute, params_.taken, params_.tiles.tiles))
        note();
      return kAllReady;
    }
    // The block's loads are far ahead of its products then, so that a look costs nothing.
    constexpr int kLook = 8;
    const int next = params_.waits_done.counts() ? kLook : kAllReady;
    const AgGemmTile tile = params_.tiles.find({m, n});
    row_ = static_cast<int>(tile.row);
    slot_ = tile.origin == params_.world.rank()
                ? kOwn
                : static_cast<int>(
                      params_.tiles.schedule.gather().slot_index(block_->bank, tile.origin));
    if (failed_) return next;
    if (all_) {
      all_ = false;
      failed_ = !block_->gather.await_all();
    }
    if (!failed_ && slot_ != kOwn)
      failed_ = !block_->gather.await_rows(tile.origin, tile.row, end_of_rows(tile));
    return next;
  }
  __device__ void load_a(const CUtensorMap& own, std::uint64_t* full, std::uint64_t hint, void* to,
                         int k) const {
    if (slot_ == kOwn) {
      cute::SM90_TMA_LOAD_2D::copy(&own, full, hint, to, k, row_);
    } else {
      cute::SM90_TMA_LOAD_3D::copy(&params_.gathered, full, hint, to, k, row_, slot_);
    }
  }
  __device__ void end() {
    if (!noted_) note();
  }

 private:
  static constexpr int kOwn = -1;
  /// Behind the rows that a tile waits for.
  __device__ std::uint32_t end_of_rows(const AgGemmTile& tile) const {
    const std::uint32_t end = tile.row + tile.rect.rows;
    if (!params_.in_bands) return end;
    const AgGemmSchedule& schedule = params_.tiles.schedule;
    const GatherSchedule& gather = schedule.gather();
    const TileGrid& grid = schedule.grid(tile.origin);
    const std::uint32_t round = tile.row / grid.tile_rows();
    const AgGemmBands::Place at = params_.bands.place(gather, tile.origin);
    return min(params_.bands.end_of_band(at, round) * grid.tile_rows(), grid.rows());
  }
  __device__ void note() {
    params_.waits_done.note();
    noted_ = true;
  }

  const Params& params_;
  Shared::Block* block_;
  int row_ = 0;
  int slot_ = kOwn;
  bool all_;
  bool failed_ = false;
  bool noted_ = false;  ///< waits_done
};

// Else nobody would stand at its executor's barriers.
static_assert(kGateLooksByWarp<AgGemmGate>);

/// Into the caller's C. What lies below a tile's rows is another tile's: whole groups of eight rows
/// go by the copy engine, the rest row by row. What lies right of its columns is right, too:
/// whoever computes it stores the same.
template <class Config>
class AgGemmStore {
 public:
  struct Params {
    AgGemmTiles tiles;
    CUtensorMap c_tile;
    CUtensorMap c_eight;
    std::byte* c;
    std::uint64_t ldc_bytes;
    std::uint32_t n;
  };
  static constexpr int kSharedWords = 0;

  __device__ AgGemmStore(const Params& params, std::uint32_t* /*words*/) : params_(params) {}

  __device__ void put(const Piece& piece) {
    if (piece.column == 0) rect_ = params_.tiles.find({piece.m, piece.n}).rect;
    const int rows = static_cast<int>(rect_.rows) - piece.row;
    if (rows <= 0 || piece.column >= static_cast<int>(rect_.columns)) return;
    const int row = static_cast<int>(rect_.row) + piece.row;
    const int column = static_cast<int>(rect_.column) + piece.column;
    if (rows >= kWarpgroupRows) {
      cute::SM90_TMA_STORE_2D::copy(&params_.c_tile, piece.bytes, column, row);
      return;
    }
    const auto* bytes = static_cast<const std::uint8_t*>(piece.bytes);
    int done = 0;
    for (; done + 8 <= rows; done += 8) {
      cute::SM90_TMA_STORE_2D::copy(&params_.c_eight, bytes + done * kRowBytes, column, row + done);
    }
    const int vectors = min(kRowBytes / 16, (static_cast<int>(params_.n) - column) / 8);
    for (; done < rows; ++done) {
      std::byte* to = params_.c + static_cast<std::uint64_t>(row + done) * params_.ldc_bytes +
                      static_cast<std::uint64_t>(column) * kElementBytes;
      for (int v = 0; v < vectors; ++v) {
        reinterpret_cast<uint4*>(to)[v] =
            *reinterpret_cast<const uint4*>(bytes + done * kRowBytes + ((v ^ (done % 8)) << 4));
      }
    }
  }
  __device__ void tile_done(int, int, int) {}
  __device__ void finish() {}

 private:
  static constexpr int kRowBytes = 128;
  const Params& params_;
  TileRect rect_;
};

}  // namespace mk::kernels::cuda
