/// \file
/// A token's sum on the CPU: product rows of one node, and other nodes' sums of it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/row_math.h"
#include "kernels/cpu/sum_rows.h"
#include "kernels/ops/combine/geometry.h"

namespace mk::kernels {

/// Adds up rows of `columns` partials, piece by piece in fp32.
class CombineRows {
 public:
  CombineRows(const RowMath& math, CombinePartials partials, std::uint32_t columns)
      : math_(math), f32_(partials == CombinePartials::kF32), columns_(columns) {}

  /// `count` of a partial's elements, from fp32.
  void store(const float* source, std::byte* target, std::uint32_t count) const {
    if (f32_) {
      std::memcpy(target, source, std::size_t{count} * sizeof(float));
    } else {
      math_.narrow(source, reinterpret_cast<std::uint16_t*>(target), count);
    }
  }

  /// before + (rows) + after, each of them from left to right: to `partial`, or with `residual`
  /// (null: none) to the elements at `result`. Each of the three calls a visitor with what it has.
  /// `counter`, unless null, counts in the partials that are added.
  template <class Before, class Rows, class After>
  void sum(Before&& before, Rows&& rows, After&& after, std::byte* partial, std::uint16_t* result,
           const std::uint16_t* residual, NonfiniteCounter* counter = nullptr) const {
    for (std::uint32_t begin = 0; begin < columns_; begin += kPiece) {
      const std::uint32_t count = std::min(kPiece, columns_ - begin);
      Sum all;
      Sum node;
      const auto add_to = [&](Sum& sum) {
        return [&, this](const std::byte* row) { add(sum, row, begin, count, counter); };
      };
      before(add_to(all));
      rows(add_to(node));
      if (node.any) add(all, node.values, count);
      after(add_to(all));
      if (!all.any) std::fill_n(all.values, count, 0.0f);
      if (result == nullptr) {
        store(all.values, partial + std::size_t{begin} * (f32_ ? 4 : 2), count);
        continue;
      }
      if (residual != nullptr) {
        // Alone, it is what comes out, bit by bit.
        (all.any ? math_.add : math_.widen)(residual + begin, all.values, count);
      }
      math_.narrow(all.values, result + begin, count);
    }
  }

 private:
  static constexpr std::uint32_t kPiece = 1024;
  struct Sum {
    bool any = false;
    float values[kPiece];
  };

  void add(Sum& sum, const std::byte* row, std::uint32_t begin, std::uint32_t count,
           NonfiniteCounter* counter) const {
    if (f32_) {
      const auto* values = reinterpret_cast<const float*>(row) + begin;
      if (counter != nullptr) counter->add(values, count);
      return add(sum, values, count);
    }
    const auto* elements = reinterpret_cast<const std::uint16_t*>(row) + begin;
    if (counter != nullptr) counter->add(elements, count);
    (sum.any ? math_.add : math_.widen)(elements, sum.values, count);
    sum.any = true;
  }
  static void add(Sum& sum, const float* values, std::uint32_t count) {
    if (!sum.any) {
      std::memcpy(sum.values, values, std::size_t{count} * sizeof(float));
    } else {
      for (std::uint32_t i = 0; i < count; ++i) sum.values[i] += values[i];
    }
    sum.any = true;
  }

  const RowMath& math_;
  bool f32_;
  std::uint32_t columns_;
};

}  // namespace mk::kernels
