/// \file
/// The words in which host and device speak of attention. Plain C++, no CUDA needed; nvcc reads
/// this, but not attention.h, whose Result brings fmt (nvcc 13.0 rejects fmt 9 as C++20).
#pragma once

#include <cstdint>

#include "kernels/cuda/core/gemm_types.h"

namespace mk::kernels::cuda {

/// A tensor of [batch, row, head, dim] elements, the dim contiguous: strides in elements, each a
/// multiple of 8. [B,S,H,D] and [B,H,S,D] differ in their strides only.
struct AttentionTensor {
  void* data = nullptr;  ///< a multiple of 16 bytes
  std::int64_t batch_stride = 0;
  std::int64_t row_stride = 0;
  std::int64_t head_stride = 0;
};

/// O = softmax(scale Q K^T) V, for each batch and query head; sums in fp32. Query head h uses key
/// head h / (query_heads / key_heads).
struct AttentionProblem {
  DType dtype = DType::kBf16;
  int head_dim = 128;  ///< 64 or 128
  int batch = 1;
  int query_heads = 1;
  int key_heads = 1;  ///< divides query_heads
  int queries = 0;    ///< rows of Q and O
  int keys = 0;       ///< rows of K and V; 0: O is zero, LSE minus infinity
  /// Query row i sees the keys up to row i + keys - queries: the last query sees all of them.
  bool causal = false;
  float scale = 0;  ///< positive; 0: 1 / sqrt(head_dim)
  AttentionTensor q;
  AttentionTensor k;
  AttentionTensor v;
  AttentionTensor o;
  /// Natural logarithm of a query's sum of exponentials, fp32; null: not wanted.
  float* lse = nullptr;
  std::int64_t lse_batch_stride = 0;
  std::int64_t lse_row_stride = 0;
  std::int64_t lse_head_stride = 0;
};

}  // namespace mk::kernels::cuda
