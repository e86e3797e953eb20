/// \file
/// The order of tiles where row tiles go by bands, of each its columns: those of an expert that are
/// computed side by side then read its weights together. Compiles for host and device.
#pragma once

#include <cstdint>

#include "kernels/comm/divisor.h"
#include "shm/platform.h"

namespace mk::kernels {

/// A tile: its row tile's place in the order of these, and its column.
struct BandedTile {
  std::uint32_t turn;
  std::uint32_t column;
};

/// The `step`-th tile of `row_tiles` row tiles in bands of kBand. `band_tiles`: kBand times the
/// column tiles of one.
template <std::uint32_t kBand>
MK_HOST_DEVICE inline BandedTile banded_tile(std::uint32_t step, std::uint32_t row_tiles,
                                             const Divisor& band_tiles) {
  const std::uint32_t band = step / band_tiles;
  const std::uint32_t within = step - band * band_tiles.value();
  const std::uint32_t left = row_tiles - band * kBand;
  const std::uint32_t height = left < kBand ? left : kBand;
  const std::uint32_t column = within / height;
  return {band * kBand + (within - column * height), column};
}

}  // namespace mk::kernels
