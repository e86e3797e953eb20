/// \file
/// The words in which host and device speak of a grouped product. Plain C++ (see gemm_types.h).
#pragma once

#include <cstdint>

#include "kernels/cuda/core/gemm_types.h"

namespace mk::kernels::cuda {

/// What is made of an expert's sums, in fp32, before they are rounded. With s(g) = g / (1 + e^-g):
enum class GroupedActivation {
  kNone,
  /// C has n / 2 columns: s(gate) * up. The first n / 2 columns of the weights are the gates'.
  kGatedSiluHalves,
  /// The same; gate and up take turns in the weights' columns.
  kGatedSiluPairs,
};

/// Row-major, no padding between rows: A [rows_max, k], B [experts, n, k] or [experts, k, n] as
/// b_layout says, C [rows_max, n] (gated: n / 2). Addresses are multiples of 16 bytes; n, k and C's
/// columns multiples of 8.
///
///     C[r] = row_scale[r] * activation(A[r] * B[expert of r] + bias[expert of r])
///
/// Which rows are whose is in device memory and may change from launch to launch. Rows [offsets[e],
/// offsets[e + 1]) are expert e's, or, where there are counts, counts[e] rows from offsets[e] on.
/// Experts without rows are fine. What reaches behind rows_max is left out. Rows of no expert are
/// not read and not written.
struct GroupedGemmProblem {
  DType dtype = DType::kBf16;
  BLayout b_layout = BLayout::kNK;
  GroupedActivation activation = GroupedActivation::kNone;
  int experts = 0;
  int rows_max = 0;
  int n = 0;
  int k = 0;
  const void* a = nullptr;
  const void* b = nullptr;
  void* c = nullptr;
  const std::uint32_t* offsets = nullptr;  ///< device memory, [experts + 1], or [experts]
  const std::uint32_t* counts = nullptr;   ///< device memory, [experts], or null
  const void* bias = nullptr;              ///< [experts, n] of dtype, or null
  const float* row_scale = nullptr;        ///< [rows_max], or null
};

/// The compiled configurations: the tile of a block.
enum class GroupedVariant { kAuto, k128x128, k128x256 };

}  // namespace mk::kernels::cuda
