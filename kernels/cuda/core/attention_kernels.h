/// \file
/// The compiled attention kernels, seen from the host: one record per element type and head
/// dimension.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/core/attention_items.h"
#include "kernels/cuda/core/attention_types.h"

namespace mk::kernels::cuda {

/// What a kernel gets, whatever its configuration.
struct AttentionArguments {
  CUtensorMap q;
  CUtensorMap k;
  CUtensorMap v;
  float scale_log2 = 0;  ///< scale * log2(e)
  int keys = 0;
  int heads_per_key_head = 1;
  int offset = kNoMask;  ///< KeyRange::offset
  DenseItems::Params items;
  std::uint32_t* dealer_words = nullptr;  ///< ItemDealer::Params::words
  AttentionTensor o;
  float* lse = nullptr;
  std::int64_t lse_batch_stride = 0;
  std::int64_t lse_row_stride = 0;
  std::int64_t lse_head_stride = 0;
};

struct AttentionKernel {
  int tile_queries;
  int tile_keys;
  int query_box_rows;  ///< of Q's tensor map; those of K and V have tile_keys
  cudaError_t (*prepare)();
  cudaError_t (*launch)(const AttentionArguments&, int blocks, cudaStream_t);
};

const AttentionKernel& attention_kernel_bf16(int head_dim);
const AttentionKernel& attention_kernel_f16(int head_dim);

}  // namespace mk::kernels::cuda
