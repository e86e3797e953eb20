#include "kernels/cuda/tile_choice.h"

#include <algorithm>

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

}  // namespace mk::kernels::cuda
