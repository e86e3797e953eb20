/// \file
/// The compiled plain matrix products, seen from the host: one record per configuration.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "kernels/cuda/core/gemm_types.h"
#include "kernels/cuda/core/tile.h"

namespace mk::kernels::cuda {

/// What a plain product's kernel gets, whatever its configuration.
struct PlainGemmArguments {
  CUtensorMap a;
  CUtensorMap b;
  CUtensorMap c;
  int a_box_rows = 0;
  int m_blocks = 0;
  int k_blocks = 0;
  int splits = 1;
  RasterOrder::Params order;
};

struct PlainGemmKernel {
  int block_m;
  int block_n;
  int cluster;     ///< blocks of one worker that are on tiles one above the other
  int b_box_rows;  ///< box of B's tensor map
  int b_box_columns;
  cudaError_t (*prepare)();
  /// How many clusters of so many blocks the current device holds.
  cudaError_t (*clusters)(int blocks, int* count);
  cudaError_t (*launch)(const PlainGemmArguments&, int workers, cudaStream_t);
};

/// The record of one configuration; `variant` must not be kAuto.
const PlainGemmKernel& plain_gemm_bf16(BLayout b_layout, GemmVariant variant);
const PlainGemmKernel& plain_gemm_f16(BLayout b_layout, GemmVariant variant);

}  // namespace mk::kernels::cuda
