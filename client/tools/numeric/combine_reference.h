/// \file
/// What GEMM+Combine must give, in float64 with a bound for each element. Written from the
/// operator's definition alone: a token's output is the sum over its slots of the slot's weight
/// times (the slot's row times the expert's weights), plus the residual.
///
/// The bound, with u = 2^-24, h the unit roundoff of the elements, q that of partials (h, or 0 in
/// fp32), g(n) = n u / (1 - n u): a slot's product p of length I is off by at most d = g(I) times
/// its size (sum_size in gemm_reference.h). Products then meet at most one rounding in their
/// weight, k - 1 in their node's sum, N - 1 in the sum over the nodes, one with the residual, and
/// two to a partial. With P = sum |weight| |p| and D = sum |weight| d, before the last rounding
///
///     E = D + ((1 + g(k + N + 1)) (1 + q)^2 - 1) (P + D) + g(k + N + 1) |residual| + (k + N) t,
///
/// where t is half a partial's least spacing. Rows that are only known to within r add R = sum
/// |weight| r |expert's weights|. It counts in P, and |row| + r in the sizes. Then |out - exact| <=
/// R + E + h (|exact| + R + E) + half the element's least spacing.
///
/// With random inputs (CombineSizes::random) R is a sum of random signs as well: at most ten times
/// the root of its terms' squares. And the mean square is limited, as in gemm_reference.h: to
///
///     sum weight^2 (g(I)^2 Q + sum (row's spread)^2 (expert's weights)^2 + 2 q^2 p^2) + h^2
///     exact^2
///
/// with Q the sum of row^2 (expert's weights)^2.
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
  bool random = false;  ///< signs are like coin tosses
};

/// What one slot of a token adds.
struct CombineTerm {
  std::span<const double> row;             ///< [I]
  std::span<const double> row_off;         ///< [I]: by how much it may be off; empty: exact
  const std::uint16_t* weights = nullptr;  ///< [I][H]
  float weight = 0;
  std::span<const double> row_spread;  ///< [I], of a random row: see moe_row; empty: exact
};

class CombineReference {
 public:
  explicit CombineReference(const CombineSizes& sizes) : sizes_(sizes) {}

  /// Compares one token's output [H] with the sum of `terms` and the residual (null: none). Its
  /// elements count from `first` on. After the last one: Comparison::judge_mean().
  void compare(std::span<const CombineTerm> terms, const std::uint16_t* residual,
               const std::uint16_t* out, std::uint64_t first, Comparison* result);

 private:
  CombineSizes sizes_;
  void multiply(const CombineTerm& term);

  // By element of the output: a slot's sums over I, of row times weights ...
  std::vector<double> product_, magnitudes_, squares_;
  std::vector<double> row_off_, row_squares_;  ///< ... and of what is not known of the row
  // ... and those of all slots.
  std::vector<double> exact_;
  std::vector<double> size_;  ///< P
  std::vector<double> off_;   ///< D
  std::vector<double> rows_;  ///< R
  std::vector<double> mean_;  ///< the mean square before the last rounding
};

}  // namespace mk::tools
