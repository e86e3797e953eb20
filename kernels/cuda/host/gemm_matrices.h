/// \file
/// What a launch of a product over all ranks is given.
#pragma once

#include <cstdint>

namespace mk::kernels {

/// In the GPU's memory, row-major. Leading dimensions are in elements. Addresses are multiples of
/// 16 bytes, leading dimensions of 8. None overlaps what is written.
struct GemmMatrices {
  const void* a = nullptr;     ///< this rank's rows of A; null if they are none
  const void* b = nullptr;     ///< per BLayout
  void* c = nullptr;           ///< this rank's rows of C; see each operator
  void* gathered = nullptr;    ///< AllGather+GEMM: null, or room for the whole A, without gaps
  const void* bias = nullptr;  ///< n elements, the same on all ranks, or null, as the plan says
  std::uint64_t lda = 0;
  std::uint64_t ldb = 0;
  std::uint64_t ldc = 0;
};

}  // namespace mk::kernels
