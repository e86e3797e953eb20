/// \file
/// The one source of chance of a simulated cluster. Same seed, same numbers, on every machine:
/// the standard library's distributions do not promise that.
#pragma once

#include <cstdint>

namespace mk::sim {

/// SplitMix64 (Steele, Lea, Flood 2014).
constexpr std::uint64_t mix(std::uint64_t word) {
  word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9ull;
  word = (word ^ (word >> 27)) * 0x94d049bb133111ebull;
  return word ^ (word >> 31);
}

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(mix(seed ^ 0x6d6b73696d000000ull)) {}

  std::uint64_t next() { return mix(state_ += 0x9e3779b97f4a7c15ull); }
  /// 0 .. n-1; n > 0.
  std::uint64_t below(std::uint64_t n) { return next() % n; }
  /// first .. last, both included.
  std::uint64_t between(std::uint64_t first, std::uint64_t last) {
    return first + below(last - first + 1);
  }
  /// True `per_million` times in a million.
  bool chance(std::uint32_t per_million) { return below(1'000'000) < per_million; }
  /// Any order of magnitude from `first` to `last` (both > 0) is equally likely: delays that are
  /// mostly short and now and then long.
  std::uint64_t scaled(std::uint64_t first, std::uint64_t last) {
    std::uint64_t low = first;
    unsigned octaves = 0;
    while (low < last / 2) {
      low *= 2;
      ++octaves;
    }
    low = first << below(octaves + 1);
    const std::uint64_t high = low * 2 < last ? low * 2 : last;
    return between(low < high ? low : high, high);
  }

 private:
  std::uint64_t state_;
};

}  // namespace mk::sim
