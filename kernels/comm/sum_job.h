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

/// Sources that a job lists one by one: a thread of a GPU has a stack for so many.
inline constexpr std::uint32_t kListedSources = shm::kLocalRanksMax;

/// Sums of nodes, one in each bank, and perhaps this node's own among them.
struct BankedSources {
  static constexpr std::uint32_t kNowhere = ~0u;
  const std::byte* first;
  std::uint64_t step;    ///< bytes from one bank's to the next one's
  const std::byte* own;  ///< this node's; null: it is not among them
  std::uint32_t own_at;  ///< its place; kNowhere: it has none

  MK_HOST_DEVICE const std::byte* at(std::uint32_t i) const {
    if (i == own_at) return own;
    return first + (i > own_at ? i - 1 : i) * step;
  }
  /// The same without the first `count`.
  MK_HOST_DEVICE BankedSources behind(std::uint32_t count) const {
    if (own_at < count) return {first + (count - 1) * step, step, nullptr, kNowhere};
    return {first + count * step, step, own, own == nullptr ? kNowhere : own_at - count};
  }
  /// Moves all of them.
  MK_HOST_DEVICE void advance(std::uint64_t bytes) {
    first += bytes;
    if (own != nullptr) own += bytes;
  }
};

/// targets[*] = round(sources[0] + sources[1] + ...), summed in fp32 from left to right; of the
/// whole sum the activation, after the bias. Strides are in elements from row to row. A gated
/// activation makes `columns` / 2 of `columns`.
struct SumJob {
  const void* sources[kListedSources];
  BankedSources banked;  ///< those behind, where there are more
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

  /// At most kListedSources.
  MK_HOST_DEVICE void add_source(const std::byte* source) { sources[source_count++] = source; }
  /// The job's last sources, `count` of them.
  MK_HOST_DEVICE void add_banks(const BankedSources& all, std::uint32_t count) {
    std::uint32_t listed = 0;
    for (; listed < count && source_count < kListedSources; ++listed) add_source(all.at(listed));
    if (listed == count) return;
    banked = all.behind(listed);
    source_count += count - listed;
  }
  MK_HOST_DEVICE const void* source(std::uint32_t i) const {
    return i < kListedSources ? sources[i] : banked.at(i - kListedSources);
  }

  /// By so many bytes.
  MK_HOST_DEVICE void move_sources(std::uint64_t bytes) {
    for (std::uint32_t s = 0; s < source_count && s < kListedSources; ++s)
      sources[s] = static_cast<const std::byte*>(sources[s]) + bytes;
    if (source_count > kListedSources) banked.advance(bytes);
  }
  /// Leaves of the rows that part, of about equal ones; false: it has none. The sources and targets
  /// are set.
  MK_HOST_DEVICE bool take(Part part) {
    if (part.count == 1) return true;
    const std::uint32_t most = div_up(rows, part.count);
    const std::uint32_t first = part.index * most;
    if (first >= rows) return false;
    move_sources(first * source_stride * bytes_of(source_type));
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
