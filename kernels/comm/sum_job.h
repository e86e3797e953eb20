/// \file
/// One tile's sum, as a role asks its executor for it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/comm/epilogue.h"
#include "kernels/comm/part.h"
#include "kernels/comm/types.h"
#include "shm/limits.h"

namespace mk::kernels {

/// Nodes, or local ranks. Kernels of GPUs take as many nodes as there may be local ranks, and their
/// threads have a stack for it.
#if defined(__CUDA_ARCH__)
inline constexpr std::uint32_t kSumSourcesMax = shm::kLocalRanksMax;
#else
inline constexpr std::uint32_t kSumSourcesMax = 1024;
#endif

/// targets[*] = round(sources[0] + sources[1] + ...), summed in fp32 from left to right; of the
/// whole sum the activation, after the bias. Strides are in elements from row to row. A gated
/// activation makes `columns` / 2 of `columns`.
struct SumJob {
  const void* sources[kSumSourcesMax];
  std::uint64_t source_stride = 0;
  std::uint32_t source_count = 0;
  /// The sum of so many of them, the first ones, is rounded before the next one is added; 0: none.
  std::uint32_t rounded_sources = 0;
  void* targets[shm::kLocalRanksMax];
  std::uint64_t target_stride = 0;
  std::uint32_t target_count = 0;
  std::uint32_t rows = 0;
  std::uint32_t columns = 0;
  // Where partial sums travel as such, or the sum is the result:
  Partials source_type = Partials::kElement;
  Partials target_type = Partials::kElement;
  Activation activation = Activation::kNone;
  const std::uint16_t* bias = nullptr;  ///< of the first column on; or null

  /// Elements are added and rounded, and nothing else.
  MK_HOST_DEVICE bool is_plain() const {
    return source_type == Partials::kElement && target_type == Partials::kElement &&
           activation == Activation::kNone && bias == nullptr;
  }

  MK_HOST_DEVICE void add_source(const std::byte* source) { sources[source_count++] = source; }

  /// Leaves of the rows that part, of about equal ones; false: it has none. The sources and targets
  /// are set.
  MK_HOST_DEVICE bool take(Part part) {
    if (part.count == 1) return true;
    const std::uint32_t most = div_up(rows, part.count);
    const std::uint32_t first = part.index * most;
    if (first >= rows) return false;
    for (std::uint32_t s = 0; s < source_count; ++s)
      sources[s] =
          static_cast<const std::byte*>(sources[s]) + first * source_stride * bytes_of(source_type);
    for (std::uint32_t t = 0; t < target_count; ++t)
      targets[t] =
          static_cast<std::byte*>(targets[t]) + first * target_stride * bytes_of(target_type);
    rows = rows - first < most ? rows - first : most;
    return true;
  }
};

/// Columns of a tile, at most: one row of sums fits a small buffer.
inline constexpr std::uint32_t kTileSideMax = 1024;

}  // namespace mk::kernels
