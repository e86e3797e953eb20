/// \file
/// How rows are dealt out over ranks: evenly, in rank order.
#pragma once

#include <cstdint>

#include "kernels/comm/divisor.h"
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

/// The same, of one number of rows and of parts, without a division for each.
class Shards {
 public:
  constexpr Shards() = default;
  MK_HOST_DEVICE constexpr Shards(std::uint32_t rows, std::uint32_t parts)
      : parts_(parts), least_(rows / parts), rest_(rows % parts) {}

  MK_HOST_DEVICE constexpr ShardRange of(std::uint32_t part) const {
    const std::uint32_t first = rows_before(part);
    return {first, rows_before(part + 1) - first};
  }
  /// Of parts 0 .. part - 1. (rows * part / parts is least * part, and what is more of rest * part,
  /// which is below parts^2.)
  MK_HOST_DEVICE constexpr std::uint32_t rows_before(std::uint32_t part) const {
    return least_ * part + rest_ * part / parts_;
  }
  /// Rows of a part, at least and at most.
  MK_HOST_DEVICE constexpr std::uint32_t least() const { return least_; }
  MK_HOST_DEVICE constexpr std::uint32_t most() const { return least_ + (rest_ != 0); }
  MK_HOST_DEVICE constexpr bool even() const { return rest_ == 0; }

 private:
  Divisor parts_;
  std::uint32_t least_ = 0;
  std::uint32_t rest_ = 0;
};

/// The most rows of any part.
MK_HOST_DEVICE constexpr std::uint32_t shard_rows_max(std::uint32_t rows, std::uint32_t parts) {
  return rows / parts + (rows % parts != 0);
}

}  // namespace mk::kernels
