/// \file
/// A matrix cut into tiles, numbered in bands. Compiles for host and device.
#pragma once

#include <cstdint>

#include "kernels/comm/divisor.h"
#include "kernels/comm/types.h"
#include "shm/platform.h"

namespace mk::kernels {

/// A tile's place, in elements.
struct TileRect {
  std::uint32_t row = 0;
  std::uint32_t column = 0;
  std::uint32_t rows = 0;
  std::uint32_t columns = 0;
};

/// Tiles [begin, end) of some numbering.
struct TileRange {
  std::uint32_t begin = 0;
  std::uint32_t end = 0;
};

/// Bytes of a bank.
struct ByteRange {
  std::uint64_t begin = 0;
  std::uint32_t bytes = 0;
};

/// rows x columns in as few tiles of at most tile_m x tile_n as cover it. Rows and columns are
/// spread evenly over the tiles, so that small or odd sizes have hardly any padding. Columns go by
/// eights, so that a packed tile's rows stay 16-byte aligned, or by another `column_step`, of which
/// tile_n is a multiple then. No rows: no tiles.
class TileGrid {
 public:
  TileGrid() = default;
  /// `band`: rows of tiles in a band (see rect).
  MK_HOST_DEVICE TileGrid(std::uint32_t rows, std::uint32_t columns, std::uint32_t tile_m,
                          std::uint32_t tile_n, std::uint32_t column_step = kColumnStep,
                          std::uint32_t band = kBandTiles)
      : rows_(rows),
        columns_(columns),
        tiles_m_(div_up(rows, tile_m)),
        tiles_n_(div_up(columns, tile_n)),
        tile_rows_(rows == 0 ? 0 : div_up(rows, tiles_m_)),
        tile_cols_(static_cast<std::uint32_t>(round_up_to(div_up(columns, tiles_n_), column_step))),
        band_(band),
        band_tiles_(band * tiles_n_),
        last_band_(tiles_m_ % band == 0 ? band : tiles_m_ % band) {}

  MK_HOST_DEVICE std::uint32_t rows() const { return rows_; }
  MK_HOST_DEVICE std::uint32_t columns() const { return columns_; }
  MK_HOST_DEVICE std::uint32_t tiles_m() const { return tiles_m_; }
  MK_HOST_DEVICE std::uint32_t tiles_n() const { return tiles_n_; }
  MK_HOST_DEVICE std::uint32_t tiles() const { return tiles_m_ * tiles_n_; }
  /// Size of every packed tile; the last ones of a row or column of tiles use less of it.
  MK_HOST_DEVICE std::uint32_t tile_rows() const { return tile_rows_; }
  MK_HOST_DEVICE std::uint32_t tile_cols() const { return tile_cols_; }

  /// Where tile `tile` lies. Tiles are numbered in bands of `band` rows of tiles, within a band
  /// column by column: tiles in work at one time then share rows of A and columns of B.
  MK_HOST_DEVICE TileRect rect(std::uint32_t tile) const {
    const std::uint32_t band = tile / band_tiles_;
    const std::uint32_t within = tile - band * band_tiles_.value();
    const std::uint32_t before = band * band_.value();
    const Divisor& rows = tiles_m_ - before < band_.value() ? last_band_ : band_;
    TileRect rect;
    rect.row = (before + within % rows) * tile_rows_;
    rect.column = within / rows * tile_cols_;
    rect.rows = rows_ - rect.row < tile_rows_ ? rows_ - rect.row : tile_rows_;
    rect.columns = columns_ - rect.column < tile_cols_ ? columns_ - rect.column : tile_cols_;
    return rect;
  }

  static constexpr std::uint32_t kBandTiles = 16;
  static constexpr std::uint32_t kColumnStep = 8;

 private:
  std::uint32_t rows_ = 0;
  std::uint32_t columns_ = 0;
  std::uint32_t tiles_m_ = 0;
  std::uint32_t tiles_n_ = 0;
  std::uint32_t tile_rows_ = 0;
  std::uint32_t tile_cols_ = 0;
  Divisor band_;        ///< rows of tiles
  Divisor band_tiles_;  ///< tiles
  Divisor last_band_;   ///< its rows of tiles
};

}  // namespace mk::kernels
