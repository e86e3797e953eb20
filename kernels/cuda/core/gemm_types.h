/// \file
/// The words in which host and device speak of a matrix product. Plain C++, no CUDA needed; nvcc
/// reads this, but not gemm.h, whose Result brings fmt (nvcc 13.0 rejects fmt 9 as C++20).
#pragma once

namespace mk::kernels::cuda {

/// K elements of one stage: 64 two-byte elements make the 128-byte rows of the widest swizzle.
inline constexpr int kBlockK = 64;

/// Element type of A, B and C; sums are always fp32.
enum class DType { kBf16, kF16 };

/// How B lies in memory: row-major [N,K] (K contiguous, the usual weight layout) or row-major [K,N]
/// (N contiguous).
enum class BLayout { kNK, kKN };

/// Columns of the pieces in which a math warpgroup's rows of C are staged and stored: 64 elements
/// are a 128-byte row.
inline constexpr int kPieceColumns = 64;

/// Row-major matrices in memory the current device can reach: A [m,k], C [m,n], B [n,k] or [k,n];
/// no padding between rows. Addresses must be multiples of 16 bytes, n and k multiples of 8; m is
/// free.
struct GemmProblem {
  DType dtype = DType::kBf16;
  BLayout b_layout = BLayout::kNK;
  int m = 0;
  int n = 0;
  int k = 0;
  const void* a = nullptr;
  const void* b = nullptr;
  void* c = nullptr;
};

/// The compiled configurations: tile of a block, and whether two blocks form a cluster that shares
/// loads of B.
enum class GemmVariant {
  kAuto,
  k128x64,
  k128x128,
  k128x160,
  k128x192,
  k128x224,
  k128x256,
  k128x256Pair
};

}  // namespace mk::kernels::cuda
