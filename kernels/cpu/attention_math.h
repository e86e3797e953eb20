/// \file
/// The arithmetic of attention tiles, on one core and in fp32: small matrix products, which
/// ordered_gemm.h takes, too, and the online softmax in base 2. What rows and heads mean is
/// cpu_attention.h's.
///
/// Matrices lie in **panels** of kPanel columns, so that a product reads what it multiplies in
/// sequence: column j of row i is at [j / kPanel][i][j % kPanel].
#pragma once

#include <cstddef>
#include <cstdint>

namespace mk::kernels {

inline constexpr std::uint32_t kPanel = 32;

/// c = a b, or c = diag(factor) c + a b. All strides are in floats:
///     a(row, step)     a[row * a_row + step * a_step]
///     b(step, column)  b[column / kPanel * b_panel + step * kPanel + column % kPanel]
///     c(row, column)   c[column / kPanel * c_panel + row * c_row + column % kPanel]
struct AttentionProduct {
  const float* a = nullptr;
  std::size_t a_row = 0;
  std::size_t a_step = 0;
  const float* b = nullptr;
  std::size_t b_panel = 0;
  float* c = nullptr;
  std::size_t c_row = 0;
  std::size_t c_panel = 0;
  const float* factor = nullptr;  ///< by row of c; null: c is overwritten
  /// By row of c, or null: the row's sum ends after so many steps, at most `depth` and never fewer
  /// than the row's before. Elements of `a` and `b` beyond are not read into it: a zero in `a`
  /// would not hide an infinity in `b`.
  const std::uint32_t* depths = nullptr;
  std::uint32_t rows = 0;
  std::uint32_t panels = 0;
  std::uint32_t depth = 0;
};

/// One tile's step of the online softmax, for `panels` panels of queries (columns) and `rows` keys:
///     max'    = max(max, scores of the column)
///     scores  = 2^(scores - max')
///     alpha   = 2^(max - max')
///     sum     = alpha sum + sum of the column's new scores
struct AttentionSoftmax {
  float* scores = nullptr;  ///< panels of `rows` rows, `panel_stride` apart; a key that a query
                            ///< must not see has -infinity
  std::size_t panel_stride = 0;
  float* max = nullptr;    ///< by column; finite at first (kNoScore)
  float* sum = nullptr;    ///< by column
  float* alpha = nullptr;  ///< by column: out
  std::uint32_t rows = 0;
  std::uint32_t panels = 0;
};

/// The maximum of no scores: finite, so that a tile in which a query sees no key changes nothing.
inline constexpr float kNoScore = -3.402823466e+38f;

/// 2^x for x <= 0 is within 4 * 2^-24 of itself, relatively; 2^0 is 1; below 2^-125 it is 0.
///
/// Variants differ in the width of their vectors and in whether they fuse multiplications with
/// additions, hence in the last bits. Each gives the same bits from run to run, and for a column
/// whatever its neighbours are.
struct AttentionMath {
  const char* name;    ///< of the variant: "generic", "avx2", "avx512"
  double flops_per_s;  ///< of one core, for estimates: 4 head_dim for each query and key
  void (*multiply)(const AttentionProduct& product);
  void (*softmax)(const AttentionSoftmax& softmax);
};

/// The best variant for this machine.
const AttentionMath& attention_math();

// For tests: the plain one, and the others or null where the machine or the build has none.
const AttentionMath& attention_math_generic();
const AttentionMath* attention_math_avx2();
const AttentionMath* attention_math_avx512();

/// What the build has, whether the machine can run it or not; for the functions above only.
extern const AttentionMath* const kAttentionMathAvx2;
extern const AttentionMath* const kAttentionMathAvx512;

}  // namespace mk::kernels
