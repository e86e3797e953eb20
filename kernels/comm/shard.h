/// \file
/// How rows are dealt out over ranks: evenly, in rank order.
#pragma once

#include <cstdint>

#include "shm/platform.h"

namespace mk::kernels {

/// Rows [first, first + count).
struct ShardRange {
  std::uint32_t first = 0;
  std::uint32_t count = 0;
  friend constexpr bool operator==(const ShardRange&, const ShardRange&) = default;
};

/// The rows of `part` when `rows` are cut into `parts`: [rows*part/parts, rows*(part+1)/parts),
/// rounded down. Counts differ by one at most; with fewer rows than parts some are 0.
MK_HOST_DEVICE constexpr ShardRange shard_of(std::uint32_t rows, std::uint32_t parts,
                                             std::uint32_t part) {
  ShardRange range;
  range.first = static_cast<std::uint32_t>(std::uint64_t{rows} * part / parts);
  range.count = static_cast<std::uint32_t>(std::uint64_t{rows} * (part + 1) / parts) - range.first;
  return range;
}

/// The most rows of any part.
MK_HOST_DEVICE constexpr std::uint32_t shard_rows_max(std::uint32_t rows, std::uint32_t parts) {
  return rows / parts + (rows % parts != 0);
}

}  // namespace mk::kernels
