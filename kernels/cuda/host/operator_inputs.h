/// \file
/// An operator's sizes and matrices as its caller gives them: checked, and as its kernel gets them.
#pragma once

#include <cstdint>

#include "kernels/comm/epilogue.h"
#include "kernels/comm/types.h"
#include "kernels/cuda/host/operator_arguments.h"
#include "shm/host/result.h"

namespace mk::kernels::cuda {

inline constexpr std::uint32_t kElementStep = 8;  ///< elements in the copy engine's 16 bytes

inline DType cuda_type(kernels::DType dtype) {
  return dtype == kernels::DType::kBf16 ? DType::kBf16 : DType::kF16;
}
inline BLayout cuda_layout(kernels::BLayout layout) {
  return layout == kernels::BLayout::kNK ? BLayout::kNK : BLayout::kKN;
}

/// A matrix product's sides and matrices, as an operator's caller gives them.
struct ProductInputs {
  const char* op;
  kernels::DType dtype;
  kernels::BLayout b_layout;
  std::uint32_t n;
  std::uint32_t k;
  const void* a;
  std::uint64_t lda;
  std::uint32_t a_rows;  ///< 0: no A
  std::uint32_t a_box_rows;
  const void* b;
  std::uint64_t ldb;
};
/// kInvalidArgument.
Result<ProductArguments> make_product(const ProductInputs& inputs, const BBox& b_box);

/// `c` of rows `ldc` apart can be stored to; kInvalidArgument.
Status check_c(const char* op, const void* c, std::uint64_t ldc, std::uint32_t n);
/// The same of a C of so many rows whose elements are sums, which count its bytes in 36 bits.
Status check_summed_c(const char* op, const void* c, std::uint64_t ldc, std::uint32_t rows,
                      std::uint32_t n);
/// C's rows of a gated product with n columns suit the kernels.
Status check_gated(const char* op, const Epilogue& epilogue, std::uint32_t n);
/// `bias` is there if the epilogue wants one, at a multiple of 16 bytes; kInvalidArgument.
Status check_bias(const char* op, const Epilogue& epilogue, const void* bias);
/// m is in 1 .. max; kInvalidArgument.
Status check_m(const char* op, std::uint32_t m, std::uint32_t max);
/// Tiles, n and k suit the kernels.
Status check_shape(const char* op, std::uint32_t tile_m, std::uint32_t tile_n, std::uint32_t n,
                   std::uint32_t k);

}  // namespace mk::kernels::cuda
