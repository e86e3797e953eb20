/// \file
/// Random matrices that any process can make again, row by row: element (row, column) of matrix
/// `stream` of run `seed` is a function of just those numbers.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "client/tools/numeric/elements.h"

namespace mk::tools {

/// SplitMix64's output function (Steele, Lea, Flood: "Fast splittable pseudorandom number
/// generators", 2014).
constexpr std::uint64_t mix64(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

/// Uniform in [-1, 1), rounded to `type`: range 1, mean 0.
struct RandomMatrix {
  std::uint64_t seed = 0;
  std::uint64_t stream = 0;
  std::uint64_t columns = 0;
  DataType type = DataType::kBf16;

  /// Writes rows [first, first + count) to `out`, dense.
  void rows(std::uint64_t first, std::uint64_t count, std::uint16_t* out) const {
    const std::uint64_t key = mix64(seed ^ mix64(stream));
    for (std::uint64_t i = first * columns; i < (first + count) * columns; ++i) {
      const auto centred = static_cast<std::int32_t>(mix64(key + i) >> 40) - (1 << 23);
      *out++ = from_float(type, static_cast<float>(centred) * (1.0f / (1 << 23)));
    }
  }
};

}  // namespace mk::tools
