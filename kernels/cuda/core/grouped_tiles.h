/// \file
/// The tiles of a grouped product as index arithmetic: from the number of rows of each expert to
/// the tile at each step. Compiles for host and device, so that it is tested on the host.
#pragma once

#include <cstdint>

#include "kernels/comm/row_bands.h"
#include "shm/platform.h"

namespace mk::kernels::cuda {

/// Experts of one grouped product, at most: a block keeps a word for each in shared memory.
inline constexpr std::uint32_t kGroupedExpertsMax = 512;
/// Rows of a tile, at most.
inline constexpr std::uint32_t kGroupedTileRows = 128;

/// One output tile: rows [row, row + rows) of C, all of one expert, and a column of tiles.
struct GroupedTile {
  int m = 0;  ///< number of the row tile, counted over all experts
  int n = 0;  ///< column of tiles
  int expert = 0;
  int row = 0;
  int rows = 0;  ///< 1 to kGroupedTileRows
};

/// The rows of an expert.
struct RowRange {
  std::uint32_t begin = 0;
  std::uint32_t end = 0;
};

/// Where the experts' rows lie: device memory that an earlier kernel has written.
struct GroupedRows {
  const std::uint32_t* offsets = nullptr;  ///< [experts + 1], or [experts] beside `counts`
  const std::uint32_t* counts = nullptr;   ///< [experts]; null: up to the next expert's offset
  std::uint32_t rows_max = 0;              ///< rows of A and C

  /// Never reaches behind rows_max, whatever the memory holds.
  MK_HOST_DEVICE RowRange of(std::uint32_t expert) const {
    RowRange range;
    const std::uint32_t offset = offsets[expert];
    range.begin = offset < rows_max ? offset : rows_max;
    const std::uint32_t room = rows_max - range.begin;
    std::uint32_t count = 0;
    if (counts != nullptr) {
      count = counts[expert];
    } else {
      const std::uint32_t next = offsets[expert + 1];
      count = next > offset ? next - offset : 0;
    }
    range.end = range.begin + (count < room ? count : room);
    return range;
  }
};

MK_HOST_DEVICE constexpr std::uint32_t row_tiles_of(const RowRange& rows) {
  return (rows.end - rows.begin + kGroupedTileRows - 1) / kGroupedTileRows;
}

/// Expert by expert; within an expert in bands of `band` row tiles, each walked column by column:
/// row tiles that follow each other share the expert's weights. The tiles in work at one time form
/// a near-square patch.
class GroupedTileList {
 public:
  /// `starts[e]`: row tiles of the experts before e; starts[experts]: of all.
  MK_HOST_DEVICE GroupedTileList(const std::uint32_t* starts, std::uint32_t experts,
                                 std::uint32_t columns, std::uint32_t band)
      : starts_(starts), experts_(experts), columns_(columns), band_(band) {}

  MK_HOST_DEVICE std::uint32_t tiles() const { return starts_[experts_] * columns_; }

  /// The tile at `step` < tiles().
  MK_HOST_DEVICE GroupedTile find(std::uint32_t step, const GroupedRows& rows) const {
    const std::uint32_t expert = expert_at(step / columns_);
    const std::uint32_t first = starts_[expert];
    const std::uint32_t row_tiles = starts_[expert + 1] - first;
    const std::uint32_t within = step - first * columns_;
    const std::uint32_t band_tiles = band_ * columns_;
    const std::uint32_t band = within / band_tiles;
    const auto [row_tile, column] =
        tile_in_band(band * band_, within - band * band_tiles, row_tiles, band_);
    const RowRange range = rows.of(expert);
    const std::uint32_t row = range.begin + row_tile * kGroupedTileRows;
    const std::uint32_t rest = range.end - row;
    GroupedTile tile;
    tile.m = static_cast<int>(first + row_tile);
    tile.n = static_cast<int>(column);
    tile.expert = static_cast<int>(expert);
    tile.row = static_cast<int>(row);
    tile.rows = static_cast<int>(rest < kGroupedTileRows ? rest : kGroupedTileRows);
    return tile;
  }

 private:
  /// The expert that row tile `row_tile` belongs to: the last that starts there or before (experts
  /// without rows start where the next one does).
  MK_HOST_DEVICE std::uint32_t expert_at(std::uint32_t row_tile) const {
    std::uint32_t low = 0;
    std::uint32_t high = experts_;  // starts_[low] <= row_tile < starts_[high]
    while (high - low > 1) {
      const std::uint32_t middle = (low + high) / 2;
      if (starts_[middle] <= row_tile) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }

  const std::uint32_t* starts_;
  std::uint32_t experts_;
  std::uint32_t columns_;
  std::uint32_t band_;
};

}  // namespace mk::kernels::cuda
