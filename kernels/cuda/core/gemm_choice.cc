#include "kernels/cuda/core/gemm_choice.h"

#include <algorithm>
#include <cmath>

namespace mk::kernels::cuda {
namespace {

int ceil_div(int a, int b) { return (a + b - 1) / b; }

struct Candidate {
  GemmVariant variant;
  int rows, columns;
  int cluster;
  double step_us;   ///< of 64 of K
  double start_us;  ///< of a launch
};

// As measured on an H100 with all SMs at it (gemm_bench --few-rows); a step of narrow tiles feels
// L2. A pair loads B once for two tiles. That leaves the GPU, which is at its power limit in long
// products, a higher clock, but starts a little later.
constexpr Candidate kCandidates[] = {{GemmVariant::k128x256, 128, 256, 1, 0.66, 0},
                                     {GemmVariant::k128x256Pair, 256, 256, 2, 0.64, 3},
                                     {GemmVariant::k128x224, 128, 224, 1, 0.59, 0},
                                     {GemmVariant::k128x192, 128, 192, 1, 0.51, 0},
                                     {GemmVariant::k128x160, 128, 160, 1, 0.43, 0},
                                     {GemmVariant::k128x128, 128, 128, 1, 0.355, 0},
                                     {GemmVariant::k128x64, 128, 64, 1, 0.23, 0}};
constexpr double kTileUs = 3;  ///< first loads and last stores

/// Weights come from memory once, beside the product: a maximum with a soft edge.
double with_weights_us(double product_us, int n, int k) {
  constexpr double kBytesOfUs = 2.7e6;  // 2.7 TB/s
  constexpr double kSharpness = 4;
  const double weights_us = 2.0 * n * k / kBytesOfUs;
  return std::pow(std::pow(product_us, kSharpness) + std::pow(weights_us, kSharpness),
                  1 / kSharpness);
}

/// Sums of the others that come and are added.
double sharing_us(const Candidate& candidate, int splits) {
  constexpr double kBegin = 2.5;
  constexpr double kOfOther = 4;  // 256 columns
  return kBegin + (splits - 1) * candidate.columns / 256.0 * kOfOther;
}

}  // namespace

GemmChoice choose_gemm(int m, int n, int k, const GemmRoom& room, bool one_order_of_k) {
  const int k_blocks = ceil_div(k, kBlockK);
  GemmChoice best;
  double best_us = 0;
  for (const Candidate& candidate : kCandidates) {
    const int tiles = ceil_div(m, candidate.rows) * ceil_div(n, candidate.columns);
    const int most = one_order_of_k ? 1 : splits_max(candidate.variant, k_blocks);
    for (int splits = 1; splits <= most; ++splits) {
      // Shares of one tile run at one time, and all tiles do.
      if (splits > 1 &&
          (tiles > room.clusters[static_cast<std::size_t>(splits)] || tiles * splits > room.blocks))
        break;
      const int workers = room.blocks / candidate.cluster;
      if (workers == 0) break;
      const int waves = splits > 1 ? 1 : ceil_div(tiles, workers);
      const double product_us =
          waves * (ceil_div(k_blocks, splits) * candidate.step_us + kTileUs) + candidate.start_us;
      const double us =
          with_weights_us(product_us, n, k) + (splits > 1 ? sharing_us(candidate, splits) : 0);
      if (best_us != 0 && us >= best_us) continue;
      best_us = us;
      best = {candidate.variant, splits};
    }
  }
  return best;
}

}  // namespace mk::kernels::cuda
