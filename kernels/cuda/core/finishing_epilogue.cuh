/// \file
/// The epilogue of the products over all ranks. What it does is chosen at launch, once for a tile
/// and outside all loops over k, so that one kernel does for all. Most launches round the sums and
/// do nothing else. The others stage the sums in fp32 (partials), or finish them: bias, activation.
#pragma once

#include <cstdint>

#include "kernels/comm/epilogue.h"
#include "kernels/cuda/core/activation.cuh"
#include "kernels/cuda/core/gemm_policies.cuh"
#include "kernels/cuda/host/operator_arguments.h"

namespace mk::kernels::cuda {

/// fp32 columns of a piece, whose rows are 128 bytes.
inline constexpr int kPieceColumnsF32 = kPieceColumns / 2;

/// Of an order of tiles that is known to the math warps: grid columns.
struct TileColumns {
  struct Params {
    std::uint32_t tile_columns = 0;
  };
  __device__ TileColumns(const Params& params, int /*worker*/) : params_(params) {}
  __device__ std::uint32_t next(const Tile& tile) const {
    return static_cast<std::uint32_t>(tile.n) * params_.tile_columns;
  }

 private:
  const Params& params_;
};

/// Of a rank alone, which takes its tiles by their numbers.
struct NumberedColumns {
  struct Params {
    TileGrid grid;
    std::uint32_t workers = 1;
  };
  __device__ NumberedColumns(const Params& params, int worker)
      : params_(params), number_(static_cast<std::uint32_t>(worker)) {}
  __device__ std::uint32_t next(const Tile& /*tile*/) {
    const std::uint32_t number = number_;
    number_ += params_.workers;
    return params_.grid.rect(number).column;
  }

 private:
  const Params& params_;
  std::uint32_t number_;
};

/// `Columns`: one of those, which says where the worker's next tile begins. `kHasPartials`: whether
/// sums may be staged in fp32.
template <class Config, class Columns, bool kHasPartials>
class FinishingEpilogue {
 public:
  struct Params {
    EpilogueArguments what;
    std::uint32_t columns = 0;  ///< of the product
    typename Columns::Params tiles;
  };
  static constexpr bool kForms = true;
  static constexpr int kSumsPerOutput = 1;  ///< of most launches; see pieces()

  /// What the storing warps go by: a tile's pieces, and the columns of each.
  static __device__ int pieces(const Params& params) {
    if (kHasPartials && params.what.f32) return Config::kBlockN / kPieceColumnsF32;
    return params.what.activation == Activation::kGatedSilu ? Config::kPieces / 2 : Config::kPieces;
  }
  static __device__ int piece_columns(const Params& params) {
    return kHasPartials && params.what.f32 ? kPieceColumnsF32 : kPieceColumns;
  }

  __device__ FinishingEpilogue(const Params& params, int worker)
      : params_(params), columns_(params.tiles, worker) {}

  __device__ bool rounds_only() const { return !params_.what.any(); }
  __device__ bool stages_f32() const { return kHasPartials && params_.what.f32; }
  __device__ bool is_gated() const { return params_.what.activation == Activation::kGatedSilu; }

  /// Of each tile, where not rounds_only().
  __device__ void begin(const Tile& tile) {
    if (params_.what.bias == nullptr) return;
    const std::uint32_t column = columns_.next(tile) + threadIdx.x % 4 * 2;
    bias_ = params_.what.bias + column;
    columns_left_ = static_cast<int>(params_.columns) - static_cast<int>(column);
  }

  /// See RoundedSums::pack.
  template <class Element>
  __device__ __forceinline__ void pack(float* sums, int column, std::uint32_t (&packed)[4]) const {
#pragma unroll
    for (int eight = 0; eight < 2; ++eight) add_bias<Element>(sums, column + eight * 8);
    float* const v = sums + column / 8 * 4;
    switch (params_.what.activation) {
      case Activation::kRelu:
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = relu(v[i]);
        break;
      case Activation::kGelu:
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = gelu(v[i]);
        break;
      case Activation::kSilu:
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = silu(v[i]);
        break;
      default:
        break;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) packed[i] = pack_two<Element>(v[2 * i], v[2 * i + 1]);
  }
  /// Of gates and ups, the same of 16 columns of C, from `column` on.
  template <class Element>
  __device__ __forceinline__ void pack_gated(float* sums, int column,
                                             std::uint32_t (&packed)[4]) const {
#pragma unroll
    for (int eight = 0; eight < 2; ++eight) {
      const int at = 2 * column + eight * 16;
      add_bias<Element>(sums, at);
      add_bias<Element>(sums, at + 8);
      constexpr float kAsTheyAre[2] = {1.0f, 1.0f};
      pack_silu_pairs<Element>(sums + at / 8 * 4, kAsTheyAre, packed + eight * 2);
    }
  }
  /// Stores this thread's sums of the kPieceColumnsF32 columns from `column` on into a piece at
  /// `piece` in shared memory, swizzled; `row`: its first row there, with the one 8 below.
  __device__ __forceinline__ void store_f32(const float* sums, int column, std::uint32_t piece,
                                            std::uint32_t row) const {
    const std::uint32_t t = threadIdx.x % 4;
#pragma unroll
    for (int eight = 0; eight < kPieceColumnsF32 / 8; ++eight) {
      const float* const v = sums + (column / 8 + eight) * 4;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::uint32_t at = row + half * 8;
        const std::uint32_t vector = (eight * 2 + t / 2) ^ (at % 8);
        ptx::store_two(piece + at * 128 + (vector << 4) + t % 2 * 8, v[2 * half], v[2 * half + 1]);
      }
    }
  }

 private:
  /// To this thread's sums of the eight columns of the tile from `column` on.
  template <class Element>
  __device__ __forceinline__ void add_bias(float* sums, int column) const {
    if (column < columns_left_) add_two_biases<Element>(sums + column / 8 * 4, bias_ + column);
  }

  const Params& params_;
  Columns columns_;
  const std::uint16_t* bias_ = nullptr;  ///< of this thread's first columns of the tile
  int columns_left_ = 0;                 ///< of the product, from those on; 0: no bias
};

}  // namespace mk::kernels::cuda
