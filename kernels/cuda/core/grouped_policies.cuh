/// \file
/// The GEMM core's policies for a grouped product. The order of tiles is made in each block from
/// the experts' rows. A gate loads a tile's rows and its expert's weights. The store writes a
/// tile's rows and no others.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <cute/arch/copy_sm90_tma.hpp>

#include "kernels/cuda/core/activation.cuh"
#include "kernels/cuda/core/gemm_config.cuh"
#include "kernels/cuda/core/gemm_policies.cuh"
#include "kernels/cuda/core/grouped_tiles.h"
#include "kernels/cuda/core/grouped_types.h"
#include "kernels/cuda/core/ptx.cuh"
#include "kernels/cuda/core/tile_feed.cuh"

namespace mk::kernels::cuda {

/// Words in device memory between the blocks of a launch, zero before the first one. The last block
/// clears them, so that launches may follow each other without the host.
struct GroupedWords {
  std::uint32_t taken;  ///< tiles taken beyond each worker's first
  std::uint32_t ended;  ///< workers that found no more
};

/// Tiles as GroupedTileList has them, each to the block that is free first: they differ in length.
class GroupedOrder {
 public:
  struct Params {
    GroupedRows rows;
    std::uint32_t experts;
    std::uint32_t columns;  ///< of tiles
    std::uint32_t band;     ///< row tiles of a band
    GroupedWords* words;
  };
  using TileType = GroupedTile;
  static constexpr bool kTaken = true;
  struct Shared {
    std::uint32_t starts[kGroupedExpertsMax + 1];  ///< GroupedTileList's
  };

  /// The block's last warp sums up the experts' row tiles.
  __device__ static void prepare(const Params& params, Shared& shared) {
    constexpr std::uint32_t kWarp = 32;
    constexpr std::uint32_t kEach = kGroupedExpertsMax / kWarp;
    if (threadIdx.x < blockDim.x - kWarp) return;
    const std::uint32_t lane = threadIdx.x % kWarp;
    // So many experts that follow each other are a lane's.
    const std::uint32_t each = (params.experts + kWarp - 1) / kWarp;
    const std::uint32_t first = lane * each;
    std::uint32_t tiles[kEach];
    std::uint32_t sum = 0;
#pragma unroll
    for (std::uint32_t i = 0; i < kEach; ++i) {
      const bool some = i < each && first + i < params.experts;
      tiles[i] = some ? row_tiles_of(params.rows.of(first + i)) : 0;
      sum += tiles[i];
    }
    std::uint32_t before = sum;
#pragma unroll
    for (std::uint32_t step = 1; step < kWarp; step *= 2) {
      const std::uint32_t left = __shfl_up_sync(0xffffffffu, before, step);
      if (lane >= step) before += left;
    }
    std::uint32_t start = before - sum;
#pragma unroll
    for (std::uint32_t i = 0; i < kEach; ++i) {
      if (i < each && first + i < params.experts) shared.starts[first + i] = start;
      start += tiles[i];
    }
    if (lane == kWarp - 1) shared.starts[params.experts] = start;
  }

  __device__ GroupedOrder(const Params& params, const Shared& shared, int worker, int workers)
      : params_(params),
        list_(shared.starts, params.experts, params.columns, params.band),
        worker_(static_cast<std::uint32_t>(worker)),
        workers_(static_cast<std::uint32_t>(workers)) {}

  __device__ bool next(GroupedTile* tile) {
    std::uint32_t step;
    const bool some =
        take_step(first_, worker_, workers_, &params_.words->taken, list_.tiles(), &step);
    first_ = false;
    if (some) {
      *tile = list_.find(step, params_.rows);
    } else {
      end();
    }
    return some;
  }

 private:
  /// Every worker is told once that there are no more; none takes one afterwards.
  __device__ void end() const {
    if (atomicAdd(&params_.words->ended, 1u) != workers_ - 1) return;
    params_.words->taken = 0;
    params_.words->ended = 0;
  }

  const Params& params_;
  GroupedTileList list_;
  std::uint32_t worker_;
  std::uint32_t workers_;
  bool first_ = true;
};

/// Loads of a tile's rows and of its expert's weights, where all is there before the launch. A gate
/// that waits for rows derives from it and calls `set`.
///
/// Maps, from the fastest dimension on: A [k, window, rows_max + 1], windows of kBlockM rows, B [k,
/// n, halves, experts] or [n, halves, k, experts] (see tensor_map.h).
template <class Config>
class GroupedInputs {
 public:
  struct Params {
    int halves;  ///< of a tile's columns that come from as many places in the weights: 1 or 2
    CUtensorMap a_half;  ///< A in windows of 64 rows, for tiles of as many
  };

  __device__ explicit GroupedInputs(const Params& params)
      : half_map_(params.a_half), halves_(params.halves) {}

  __device__ int wait(const GroupedTile& tile, int /*k_block*/) {
    set(tile);
    return kAllReady;
  }
  __device__ void load_a(const CUtensorMap& a, std::uint64_t* full, std::uint64_t hint, void* to,
                         int k) const {
    const int window = is_half() ? kWarpgroupRows : Config::kBlockM;
    cute::SM90_TMA_LOAD_3D::copy(is_half() ? &half_map_ : &a, full, hint, to, k, window - rows_,
                                 row_end_);
  }
  __device__ int a_bytes() const { return is_half() ? Config::kABytes / 2 : Config::kABytes; }
  __device__ void load_b(const CUtensorMap& b, std::uint64_t* full, std::uint64_t hint, void* to,
                         int k) const {
    if constexpr (Config::kBLayout == BLayout::kNK) {
      cute::SM90_TMA_LOAD_4D::copy(&b, full, hint, to, k, column_, 0, expert_);
    } else {
      constexpr int kBoxes = Config::kBlockN / Config::kBBox;
      constexpr int kBoxBytes = Config::kBBox * kBlockK * 2;
      const int boxes_of_half = kBoxes / halves_;
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        const int half = box >= boxes_of_half ? 1 : 0;
        cute::SM90_TMA_LOAD_4D::copy(
            &b, full, hint, static_cast<std::uint8_t*>(to) + box * kBoxBytes,
            column_ + (box - half * boxes_of_half) * Config::kBBox, half, k, expert_);
      }
    }
  }

 protected:
  __device__ void set(const GroupedTile& tile) {
    rows_ = tile.rows;
    row_end_ = tile.row + tile.rows;
    column_ = tile.n * (Config::kBlockN / halves_);
    expert_ = tile.expert;
  }

 private:
  /// The second math warpgroup has none of the tile's rows. Bringing it zeros would take shared
  /// memory's time, which is short where one warpgroup reads all of the weights.
  __device__ bool is_half() const { return rows_ <= kWarpgroupRows; }

  const CUtensorMap& half_map_;
  int halves_;
  int rows_ = 0;
  int row_end_ = 0;
  int column_ = 0;
  int expert_ = 0;
};

/// What grouped epilogues go by.
struct GroupedEpilogueParams {
  const void* bias;        ///< [experts, columns] of Element, or null
  const float* row_scale;  ///< of C's rows, or null
  int columns;             ///< n: of an expert's weights
};

/// Bias, activation and scale of a row, as far as there are any.
template <class Config, GroupedActivation kActivation>
class GroupedEpilogue {
 public:
  using Params = GroupedEpilogueParams;
  static constexpr bool kGated = kActivation != GroupedActivation::kNone;
  static constexpr bool kHalves = kActivation == GroupedActivation::kGatedSiluHalves;
  static constexpr int kSumsPerOutput = kGated ? 2 : 1;

  __device__ explicit GroupedEpilogue(const Params& params) : params_(params) {}

  __device__ void begin(const GroupedTile& tile, int row) {
    const int column = tile.n * (kHalves ? Config::kBlockN / 2 : Config::kBlockN);
    const int columns = kHalves ? params_.columns / 2 : params_.columns;
    columns_left_ = params_.bias == nullptr ? 0 : columns - column;
    bias_ = static_cast<const std::uint16_t*>(params_.bias) +
            static_cast<std::int64_t>(tile.expert) * params_.columns + column + threadIdx.x % 4 * 2;
    scale_[0] = scale_[1] = 1.0f;
    if (params_.row_scale == nullptr) return;
    if (row < tile.rows) scale_[0] = params_.row_scale[tile.row + row];
    if (row + 8 < tile.rows) scale_[1] = params_.row_scale[tile.row + row + 8];
  }

  template <class Element>
  __device__ __forceinline__ void pack(float* sums, int column, std::uint32_t (&packed)[4]) const {
    if constexpr (kActivation == GroupedActivation::kGatedSiluPairs) {
      pack_pairs<Element>(sums, column, packed);
    } else {
#pragma unroll
      for (int eight = 0; eight < 2; ++eight) {
        const int at = column + eight * 8;
        float* const v = sums + at / 8 * 4;
        add_bias<Element>(v, bias_, at);
        if constexpr (kHalves) {
          float* const up = v + Config::kBlockN / 4;
          add_bias<Element>(up, bias_ + params_.columns / 2, at);
#pragma unroll
          for (int i = 0; i < 4; ++i) v[i] = silu(v[i]) * up[i];
        }
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          packed[eight * 2 + row] =
              pack_two<Element>(v[2 * row] * scale_[row], v[2 * row + 1] * scale_[row]);
        }
      }
    }
  }

 private:
  /// To this thread's four of eight columns of sums: the bias of the columns from `column` behind
  /// `bias` on.
  template <class Element>
  __device__ __forceinline__ void add_bias(float* v, const std::uint16_t* bias, int column) const {
    if (column >= columns_left_) return;
    add_two_biases<Element>(v, bias + column);
  }

  /// See pack_silu_pairs.
  template <class Element>
  __device__ __forceinline__ void pack_pairs(float* sums, int column,
                                             std::uint32_t (&packed)[4]) const {
#pragma unroll
    for (int eight = 0; eight < 2; ++eight) {
      const int at = 2 * column + eight * 16;
      float* const v = sums + at / 8 * 4;
      add_bias<Element>(v, bias_, at);
      add_bias<Element>(v + 4, bias_, at + 8);
      pack_silu_pairs<Element>(v, scale_, packed + eight * 2);
    }
  }

  const Params& params_;
  const std::uint16_t* bias_ = nullptr;  ///< this thread's of the tile's first columns
  int columns_left_ = 0;                 ///< from the tile's first column on; 0: no bias
  float scale_[2];                       ///< of the thread's rows
};

/// Into row-major C: a piece's rows that are the tile's, by one TMA store through a map of windows
/// (make_row_window_map): the last of a window's rows are the piece's.
template <class Config, int kSumsPerOutput>
class GroupedStore {
 public:
  struct Params {
    CUtensorMap c;
  };
  static constexpr int kSharedWords = 0;

  __device__ GroupedStore(const Params& params, std::uint32_t* /*words*/) : params_(params) {}

  __device__ void put(const Piece& piece, const GroupedTile& tile) {
    const int left = tile.rows - piece.row;
    const int rows = left < kWarpgroupRows ? left : kWarpgroupRows;
    cute::SM90_TMA_STORE_3D::copy(&params_.c, piece.bytes,
                                  tile.n * (Config::kBlockN / kSumsPerOutput) + piece.column,
                                  kWarpgroupRows - rows, tile.row + piece.row + rows);
  }
  __device__ void tile_done(const GroupedTile&, int) {}
  __device__ void finish() {}

 private:
  const Params& params_;
};

}  // namespace mk::kernels::cuda
