/// \file
/// Sequences of different lengths that follow each other in the ranks' tensors. Each is cut into
/// parts by itself, as RingAttentionSchedule cuts one; a rank's rows are its parts of the first
/// sequence, then those of the second, and so on.
#pragma once

#include <cstdint>

#include "shm/platform.h"

namespace mk::kernels {

/// What the blocks of a launch look at. Compiles for host and device.
struct PackedSequences {
  std::uint32_t count = 0;                    ///< 0: the launch is not packed
  const std::uint32_t* rows = nullptr;        ///< of each sequence, over all ranks
  const std::uint32_t* items = nullptr;       ///< [count + 1]: this rank's, of the sequences before
  const std::uint32_t* first_rows = nullptr;  ///< [rank][sequence]: a rank's, of those before

  /// The sequence of an item of this rank.
  MK_HOST_DEVICE std::uint32_t sequence_of(std::uint32_t item) const {
    std::uint32_t begin = 0, end = count;
    while (end - begin > 1) {
      const std::uint32_t middle = begin + (end - begin) / 2;
      (items[middle] <= item ? begin : end) = middle;
    }
    return begin;
  }
};

}  // namespace mk::kernels
