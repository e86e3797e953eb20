/// \file
/// Lanes: who makes a piece of a routing plan, or of a combine's index, together. Compiles for host
/// and device.
#pragma once

#include <cstdint>

#include "shm/platform.h"

namespace mk::kernels {

/// Makes a piece of the plan: lane `index` of `count`, which all call it. `sync` is a barrier
/// between them; `least(word, value)` makes the word the lesser of both, `most` the greater, and
/// `add` their sum, beside others. Several have `scratch`: `scratch_words` words that all of them
/// read and write, count + 1 at the least. Here one does it alone.
struct OneLane {
  static constexpr bool kAlone = true;
  static constexpr std::uint32_t index = 0;
  static constexpr std::uint32_t count = 1;
  MK_HOST_DEVICE void sync() const {}
  MK_HOST_DEVICE void least(std::uint32_t* word, std::uint32_t value) const {
    if (value < *word) *word = value;
  }
  MK_HOST_DEVICE void most(std::uint32_t* word, std::uint32_t value) const {
    if (value > *word) *word = value;
  }
  template <class Word>
  MK_HOST_DEVICE void add(Word* word, Word value) const {
    *word += value;
  }
};

/// The scratch of several lanes: a word for each of some experts and each lane.
template <class Lanes>
class LaneScratch {
 public:
  MK_HOST_DEVICE LaneScratch(const Lanes& lanes, std::uint32_t experts)
      : lanes_(lanes), experts_(experts), stride_(lanes.count | 1) {}  // odd: for memory in banks

  MK_HOST_DEVICE std::uint32_t* word(std::uint32_t expert, std::uint32_t lane) const {
    return lanes_.scratch + (std::uint64_t{expert} * stride_ + lane);
  }
  /// Calls visit(first, end) for as many experts at a time as there is room for.
  template <class Visit>
  MK_HOST_DEVICE void for_rounds(Visit&& visit) const {
    const std::uint32_t at_once = lanes_.scratch_words / stride_;
    for (std::uint32_t first = 0; first < experts_; first += at_once) {
      if (first != 0) lanes_.sync();
      visit(first, experts_ - first < at_once ? experts_ : first + at_once);
    }
  }
  /// Calls visit(expert) for this lane's of [first, end).
  template <class Visit>
  MK_HOST_DEVICE void for_own(std::uint32_t first, std::uint32_t end, Visit&& visit) const {
    for (std::uint32_t e = first + lanes_.index; e < end; e += lanes_.count) visit(e);
  }

 private:
  const Lanes& lanes_;
  std::uint32_t experts_;
  std::uint32_t stride_;
};

}  // namespace mk::kernels
