/// \file
/// Rows of bf16 and f16: to fp32, from fp32 (to nearest, ties to even; a NaN stays a NaN), and
/// sums.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/comm/types.h"

namespace mk::kernels {

/// All variants give the same bits: every step is one IEEE operation.
struct RowMath {
  const char* name;  ///< of the variant: "generic" or "avx2"
  void (*widen)(const std::uint16_t* source, float* target, std::size_t count);
  void (*narrow)(const float* source, std::uint16_t* target, std::size_t count);
  /// sum[i] += source[i]
  void (*add)(const std::uint16_t* source, float* sum, std::size_t count);
};

/// The best variant for this machine.
const RowMath& row_math(DType dtype);

/// The plain one, for tests.
const RowMath& row_math_generic(DType dtype);
/// Null where the machine or the build has none.
const RowMath* row_math_avx2(DType dtype);

/// What the build has, by DType, whether the machine can run it or not; for row_math_avx2 only.
extern const RowMath* const kRowMathAvx2[2];

}  // namespace mk::kernels
