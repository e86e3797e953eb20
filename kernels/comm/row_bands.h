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

/// The `within`-th tile of the band of at most `most` row tiles that begins with row tile `first`,
/// of `row_tiles` in all.
MK_HOST_DEVICE inline BandedTile tile_in_band(std::uint32_t first, std::uint32_t within,
                                              std::uint32_t row_tiles, std::uint32_t most) {
  const std::uint32_t left = row_tiles - first;
  const std::uint32_t height = left < most ? left : most;
  const std::uint32_t column = within / height;
  return {first + (within - column * height), column};
}

/// The `step`-th tile of `row_tiles` row tiles in bands of kBand. `band_tiles`: kBand times the
/// column tiles of one.
template <std::uint32_t kBand>
MK_HOST_DEVICE inline BandedTile banded_tile(std::uint32_t step, std::uint32_t row_tiles,
                                             const Divisor& band_tiles) {
  const std::uint32_t band = step / band_tiles;
  return tile_in_band(band * kBand, step - band * band_tiles.value(), row_tiles, kBand);
}

}  // namespace mk::kernels
