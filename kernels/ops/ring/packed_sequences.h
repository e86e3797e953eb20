/// \file
/// Sequences of different lengths that follow each other in the ranks' tensors. Each is cut into
/// parts by itself, as RingAttentionSchedule cuts one. A rank's rows are its parts of the first
/// sequence, then those of the second, and so on. A sequence may be empty.
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
  const std::uint32_t* rank_rows = nullptr;   ///< [rank]: its rows of all sequences

  /// The sequence of an item of this rank. (GPUs have a table of their own: packed_items.h.)
  MK_HOST_DEVICE std::uint32_t sequence_of(std::uint32_t item) const {
    std::uint32_t begin = 0, end = count;
    while (end - begin > 1) {
      const std::uint32_t middle = begin + (end - begin) / 2;
      (items[middle] <= item ? begin : end) = middle;
    }
    return begin;
  }
};

/// A number that stands for the lengths, for Launch::m: ranks with other lengths have another one,
/// as good as certainly. It is made of every sequence's end, in any order.
class LengthsDigest {
 public:
  /// To be added up over all sequences.
  MK_HOST_DEVICE static constexpr std::uint64_t of(std::uint32_t sequence, std::uint32_t end) {
    // The finaliser of MurmurHash3, which spreads each bit over all.
    std::uint64_t bits = (std::uint64_t{sequence} << 32 | end) + 0x9e3779b97f4a7c15ull;
    bits = (bits ^ bits >> 33) * 0xff51afd7ed558ccdull;
    bits = (bits ^ bits >> 33) * 0xc4ceb9fe1a85ec53ull;
    return bits ^ bits >> 33;
  }
  /// Never zero.
  MK_HOST_DEVICE static constexpr std::uint32_t finish(std::uint64_t sum) {
    return static_cast<std::uint32_t>(sum >> 32) | 1;
  }
};

}  // namespace mk::kernels
