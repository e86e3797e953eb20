/// \file
/// One tile's sum, as a role asks its executor for it.
#pragma once

#include <cstdint>

#include "shm/limits.h"

namespace mk::kernels {

/// targets[*] = round(sources[0] + sources[1] + ...), summed in fp32 from left to right. Strides
/// are in elements from row to row.
struct SumJob {
  const void* sources[shm::kNodesMax];
  std::uint64_t source_stride = 0;
  std::uint32_t source_count = 0;
  void* targets[shm::kLocalRanksMax];
  std::uint64_t target_stride = 0;
  std::uint32_t target_count = 0;
  std::uint32_t rows = 0;
  std::uint32_t columns = 0;
};
static_assert(shm::kNodesMax >= shm::kLocalRanksMax, "sources are nodes or local ranks");

/// Columns of a tile, at most: one row of sums fits a small buffer.
inline constexpr std::uint32_t kTileSideMax = 1024;

}  // namespace mk::kernels
