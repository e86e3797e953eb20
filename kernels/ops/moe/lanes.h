/// \file
/// Lanes: who makes a piece of a routing plan, or of a combine's index, together. Compiles for host
/// and device.
#pragma once

#include <cstdint>

#include "kernels/comm/shard.h"
#include "kernels/comm/tile_grid.h"
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

template <class Lanes>
MK_HOST_DEVICE constexpr bool is_alone() {
  return requires { Lanes::kAlone; };
}

/// A number of each lane's, added up.
struct LaneSums {
  std::uint32_t before = 0;  ///< over the lanes before this one
  std::uint32_t all = 0;
};
/// Adds up what the lanes have. By all lanes together, which use their scratch.
template <class Lanes>
MK_HOST_DEVICE inline LaneSums sums_over(const Lanes& lanes, std::uint32_t own) {
  if constexpr (is_alone<Lanes>()) {
    return {0, own};
  } else {
    lanes.sync();  // the scratch may be in use
    lanes.scratch[lanes.index] = own;
    lanes.sync();
    LaneSums sums;
    constexpr std::uint32_t kBatch = 8;  // their loads are on their way together
    for (std::uint32_t begin = 0; begin < lanes.count; begin += kBatch) {
      std::uint32_t words[kBatch];
      for (std::uint32_t i = 0; i < kBatch; ++i)
        words[i] = begin + i < lanes.count ? lanes.scratch[begin + i] : 0;
      for (std::uint32_t i = 0; i < kBatch; ++i) {
        if (begin + i < lanes.index) sums.before += words[i];
        sums.all += words[i];
      }
    }
    return sums;
  }
}

/// The `index`-th of `runs` runs of `count` things: all are as long, but for the last ones.
MK_HOST_DEVICE inline TileRange run_of(std::uint32_t index, std::uint32_t runs,
                                       std::uint32_t count) {
  const std::uint32_t each = div_up(count, runs);
  const std::uint32_t begin = each * index < count ? each * index : count;
  return {begin, count - begin < each ? count : begin + each};
}
/// This lane's, as each lane has one.
template <class Lanes>
MK_HOST_DEVICE inline TileRange run_of(const Lanes& lanes, std::uint32_t count) {
  return run_of(lanes.index, lanes.count, count);
}

/// Words that lie `step` words apart.
struct WordRow {
  std::uint32_t* first;
  std::uint32_t step = 1;
  MK_HOST_DEVICE std::uint32_t* at(std::uint32_t i) const {
    return first + std::uint64_t{step} * i;
  }
};

// The next functions are short for a reason: a GPU takes 0.1 µs for eight instructions that it runs
// for the first time in a launch.

/// The sum of the row's words of the run.
MK_HOST_DEVICE inline std::uint32_t sum_of(const WordRow& row, const TileRange& run) {
  constexpr std::uint32_t kBatch = 8;  // their loads are on their way together
  std::uint32_t sum = 0;
  for (std::uint32_t begin = run.begin; begin < run.end; begin += kBatch) {
    std::uint32_t counts[kBatch];
    for (std::uint32_t i = 0; i < kBatch; ++i)
      counts[i] = begin + i < run.end ? *row.at(begin + i) : 0;
    for (std::uint32_t i = 0; i < kBatch; ++i) sum += counts[i];
  }
  return sum;
}
/// Makes counts, the row's words of the run, which follow each other from `next` on, into where
/// each begins. Answers where the last one ends.
MK_HOST_DEVICE inline std::uint32_t make_starts(const WordRow& row, const TileRange& run,
                                                std::uint32_t next) {
  constexpr std::uint32_t kBatch = 8;  // their loads are on their way together
  for (std::uint32_t begin = run.begin; begin < run.end; begin += kBatch) {
    std::uint32_t counts[kBatch];
    for (std::uint32_t i = 0; i < kBatch; ++i)
      counts[i] = begin + i < run.end ? *row.at(begin + i) : 0;
    for (std::uint32_t i = 0; i < kBatch; ++i) {
      if (begin + i < run.end) *row.at(begin + i) = next;
      next += counts[i];
    }
  }
  return next;
}
/// The same of `count` words from 0 on, by all lanes together: one lane alone loads one after the
/// other. Every lane may read them after the next barrier.
template <class Lanes>
MK_HOST_DEVICE inline std::uint32_t make_starts_by(const Lanes& lanes, std::uint32_t* words,
                                                   std::uint32_t count) {
  const TileRange run = run_of(lanes, count);
  if constexpr (is_alone<Lanes>()) {
    return make_starts({words}, run, 0);
  } else {
    const LaneSums sums = sums_over(lanes, sum_of({words}, run));
    make_starts({words}, run, sums.before);
    return sums.all;
  }
}

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
