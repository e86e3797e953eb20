#include "kernels/cuda/tile_choice.h"

#include <algorithm>

#include "kernels/cuda/gemm_types.h"
#include "kernels/cuda/gpu_rates.h"

namespace mk::kernels::cuda {

std::uint32_t best_tile_columns(std::uint64_t row_tiles, std::uint32_t n, std::uint32_t blocks,
                                double half_tile_time) {
  const std::uint64_t compute = std::max(1u, blocks - blocks / 16);
  const auto waves = [&](std::uint32_t columns) {
    return (row_tiles * div_up(n, columns) + compute - 1) / compute;
  };
  const std::uint32_t half = kTileColumnsMax / 2;
  return static_cast<double>(waves(half)) * half_tile_time <
                 static_cast<double>(waves(kTileColumnsMax))
             ? half
             : kTileColumnsMax;
}

// Math is at the next tile while one leaves, so that it has nearly that one's time for it.
std::uint32_t tile_piece_ns(const SumGeometry& plan, std::uint32_t k, double stores,
                            const CudaOptions& options) {
  constexpr double kOfTile = 0.75;
  if (options.piece_ns) return *options.piece_ns;
  // Of ranks that share a GPU it has not been measured.
  if (plan.nodes != 1 || plan.locals == 1 || options.ranks_per_device != 1) return 0;
  const MachineRates& rates = options.rates;
  const MachineRates gpu = gpu_rates(rates, kBlocksMax);
  const double sent = stores * kElementBytes * (plan.locals - 1.0) / plan.locals;
  const double link = rates.local_bytes_per_s > 0 ? rates.local_bytes_per_s : kNvlinkBytesPerS;
  if (!product_outlasts(k, sent, link, gpu)) return 0;
  const double tile_s = 2.0 * k * plan.tile_m * plan.tile_n / (gpu.flops_per_s / kBlocksMax);
  const std::uint32_t pieces = div_up(plan.tile_n, static_cast<std::uint32_t>(kPieceColumns));
  return static_cast<std::uint32_t>(std::min(kOfTile * tile_s / pieces, 1e-3) * 1e9);
}

}  // namespace mk::kernels::cuda
