/// \file
/// Which tile the plain product takes, and how many blocks share a tile's K. Plain C++, a pure
/// function of the sizes and the GPU.
#pragma once

#include <array>

#include "kernels/cuda/core/gemm_types.h"

namespace mk::kernels::cuda {

/// Blocks of a cluster, at most.
inline constexpr int kClusterMax = 8;

/// What a device holds at one time, with one block on a multiprocessor.
struct GemmRoom {
  int blocks = 132;
  /// Clusters of so many blocks. They lie within one part of the GPU, so they may be fewer than
  /// blocks / size.
  std::array<int, kClusterMax + 1> clusters{};
};

struct GemmChoice {
  GemmVariant variant = GemmVariant::k128x256;
  int splits = 1;
};

/// Tile and shares of K of the least estimated time. `one_order_of_k`: K is not shared, so that an
/// element's bits do not depend on m.
GemmChoice choose_gemm(int m, int n, int k, const GemmRoom& room, bool one_order_of_k = false);

/// Blocks that can share a tile's K of `k_blocks` blocks, at most: others' sums come to where a
/// block's stages were (split_sums.cuh).
constexpr int splits_max(GemmVariant variant, int k_blocks) {
  const int room = variant == GemmVariant::k128x64    ? kClusterMax
                   : variant == GemmVariant::k128x128 ? 7
                   : variant == GemmVariant::k128x160 ? 5
                                                      : 1;
  return room < k_blocks ? room : k_blocks;
}

}  // namespace mk::kernels::cuda
