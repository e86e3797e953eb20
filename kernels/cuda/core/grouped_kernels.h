/// \file
/// The compiled grouped products, seen from the host: one record per configuration.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "kernels/cuda/core/grouped_tiles.h"
#include "kernels/cuda/core/grouped_types.h"

namespace mk::kernels::cuda {

/// Device memory between the blocks of a launch (grouped_policies.cuh).
struct GroupedWords;

/// What a grouped product's kernel gets, whatever its configuration.
struct GroupedArguments {
  CUtensorMap a;
  CUtensorMap a_half;  ///< in windows of half as many rows
  CUtensorMap b;
  CUtensorMap c;
  int k_blocks = 0;
  GroupedRows rows;
  std::uint32_t experts = 0;
  std::uint32_t columns = 0;  ///< of tiles
  std::uint32_t band = 0;     ///< row tiles of a band
  GroupedWords* words = nullptr;
  int halves = 1;
  int n = 0;
  const void* bias = nullptr;
  const float* row_scale = nullptr;
};

struct GroupedKernel {
  int block_n;
  cudaError_t (*prepare)();
  cudaError_t (*launch)(const GroupedArguments&, int workers, cudaStream_t);
};

inline constexpr std::size_t kGroupedWordsBytes = 8;

/// The record of one configuration; `plain`: neither bias nor scale, no activation; `variant` must
/// not be kAuto.
const GroupedKernel& grouped_kernel_bf16(BLayout layout, GroupedActivation activation, bool plain,
                                         GroupedVariant variant);
const GroupedKernel& grouped_kernel_f16(BLayout layout, GroupedActivation activation, bool plain,
                                        GroupedVariant variant);

}  // namespace mk::kernels::cuda
