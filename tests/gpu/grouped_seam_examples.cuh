/// \file
/// One example of each policy of the grouped product that an operator replaces: tiles of a list in
/// device memory, a gate on the rows' arrival with a deadline, a store that scatters rows.
#pragma once

#include "kernels/cuda/core/grouped_policies.cuh"
#include "shm/flag.h"
#include "tests/gpu/grouped_seams.h"

namespace mk::test {

namespace mkc = kernels::cuda;
using GroupedSeamConfig = mkc::GemmConfig<__nv_bfloat16, mkc::BLayout::kNK, 128, 256, 4, 1>;

/// Tiles of a list in device memory, column by column; each worker takes every `workers`-th.
class ListOrder {
 public:
  struct Params {
    const mkc::GroupedTile* list;
    const std::uint32_t* row_tiles;
    std::uint32_t columns;
  };
  using TileType = mkc::GroupedTile;
  static constexpr bool kTaken = true;

  __device__ ListOrder(const Params& params, int worker, int workers)
      : params_(params),
        step_(static_cast<std::uint32_t>(worker)),
        workers_(static_cast<std::uint32_t>(workers)),
        row_tiles_(*params.row_tiles) {}

  __device__ bool next(mkc::GroupedTile* tile) {
    if (step_ >= row_tiles_ * params_.columns) return false;
    *tile = params_.list[step_ % row_tiles_];
    tile->n = static_cast<int>(step_ / row_tiles_);
    step_ += workers_;
    return true;
  }

 private:
  const Params& params_;
  std::uint32_t step_;
  std::uint32_t workers_;
  std::uint32_t row_tiles_;
};

/// Waits for the chunks that a tile's rows came in.
class ArrivalGate : public mkc::GroupedInputs<GroupedSeamConfig> {
 public:
  struct Params {
    mkc::GroupedInputs<GroupedSeamConfig>::Params inputs;
    const std::uint32_t* arrived;
    std::uint32_t epoch;
    std::uint64_t deadline_ns;
    std::uint32_t* failed;
  };

  __device__ explicit ArrivalGate(const Params& params)
      : mkc::GroupedInputs<GroupedSeamConfig>(params.inputs), params_(params) {}

  __device__ int wait(const mkc::GroupedTile& tile, int /*k_block*/) {
    set(tile);
    const int last = (tile.row + tile.rows - 1) / GroupedSeamProduct::kChunkRows;
    for (int chunk = tile.row / GroupedSeamProduct::kChunkRows; chunk <= last; ++chunk) {
      const std::uint64_t deadline_ns = mkc::ptx::now_ns() + params_.deadline_ns;
      while (!shm::flag_reached(params_.arrived + chunk, params_.epoch)) {
        if (mkc::ptx::now_ns() > deadline_ns) shm::store_relaxed(params_.failed, 1u);
        if (shm::load_relaxed(params_.failed) != 0) return mkc::kAllReady;
        __nanosleep(100);
      }
    }
    mkc::ptx::fence_acquired_to_async();
    return mkc::kAllReady;
  }

 private:
  const Params& params_;
};

/// Stores each row where a table says. (The copy engine swizzles by shared memory's addresses, so
/// that a box of one row may begin at any row of a piece.)
class ScatterStore {
 public:
  struct Params {
    CUtensorMap c;  ///< [rows, n], box 1 x 64
    const std::uint32_t* to;
  };
  static constexpr int kSharedWords = 0;

  __device__ ScatterStore(const Params& params, std::uint32_t* /*words*/) : params_(params) {}

  __device__ void put(const mkc::Piece& piece, const mkc::GroupedTile& tile) {
    const int rows = min(tile.rows - piece.row, mkc::kWarpgroupRows);
    const int column = tile.n * GroupedSeamConfig::kBlockN + piece.column;
    for (int row = 0; row < rows; ++row) {
      cute::SM90_TMA_STORE_2D::copy(
          &params_.c, static_cast<const std::uint8_t*>(piece.bytes) + row * mkc::kPieceColumns * 2,
          column, static_cast<int>(params_.to[tile.row + piece.row + row]));
    }
  }
  __device__ void tile_done(const mkc::GroupedTile&, int) {}
  __device__ void finish() {}

 private:
  const Params& params_;
};

}  // namespace mk::test
