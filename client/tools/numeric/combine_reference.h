/// \file
/// What GEMM+Combine must give, in float64 with a bound for each element. Written from the
/// operator's definition alone: a token's output is the sum over its slots of the slot's weight
/// times (the slot's row times the expert's weights), plus the residual.
///
/// The bound, with u = 2^-24, h the unit roundoff of the elements, q that of partials (h, or 0 in
/// fp32), g(n) = n u / (1 - n u): each term meets at most I + 1 roundings in its product and
/// weight, k - 1 in its node's sum, N - 1 in the sum over the nodes, one with the residual, and two
/// to a partial. So before the last rounding
///     E = ((1 + g(I + k + N + 1)) (1 + q)^2 - 1) (A + |residual|) + (k + N) t,
/// where A is the sum of |weight| |row| |expert's weights| and t half a partial's least spacing.
/// Rows that are only known to within d add D, the sum of |weight| d |expert's weights|, and count
/// in A with |row| + d. Then |out - exact| <= D + E + h (|exact| + D + E) + half the element's
/// least spacing.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "client/tools/numeric/comparison.h"
#include "client/tools/numeric/elements.h"

namespace mk::tools {

struct CombineSizes {
  std::uint32_t nodes = 1;
  std::uint32_t top_k = 0;
  std::uint64_t hidden = 0;    ///< H
  std::uint64_t features = 0;  ///< I
  DataType type = DataType::kBf16;
  bool f32_partials = false;
};

/// What one slot of a token adds.
struct CombineTerm {
  std::span<const double> row;             ///< [I]
  std::span<const double> row_off;         ///< [I]: by how much it may be off; empty: exact
  const std::uint16_t* weights = nullptr;  ///< [I][H]
  float weight = 0;
};

class CombineReference {
 public:
  explicit CombineReference(const CombineSizes& sizes) : sizes_(sizes) {}

  /// Compares one token's output [H] with the sum of `terms` and the residual (null: none). Its
  /// elements count from `first` on.
  void compare(std::span<const CombineTerm> terms, const std::uint16_t* residual,
               const std::uint16_t* out, std::uint64_t first, Comparison* result);

 private:
  CombineSizes sizes_;
  std::vector<double> exact_;
  std::vector<double> size_;  ///< A
  std::vector<double> off_;   ///< D
};

}  // namespace mk::tools
