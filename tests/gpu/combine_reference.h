/// \file
/// How GEMM+Combine on GPUs is judged: float64 on the GPU, with a bound for every element, which is
/// that of kernels/ops/combine/README.md with |p| at its most, S.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/comm/types.h"
#include "shm/limits.h"
#include "tests/gpu/gemm_reference.h"

namespace mk::test {

/// What one slot of a token adds.
struct CombineSlot {
  std::int32_t rank = -1;   ///< where its row is; -1: nothing
  std::int32_t row = 0;     ///< of that rank's y
  std::int32_t expert = 0;  ///< of that rank's
  float weight = 0;
};

/// One rank's tokens. All memory reachable from the current device.
struct CombineProblem {
  static constexpr int kRanksMax = 16;
  kernels::DType dtype = kernels::DType::kBf16;
  kernels::BLayout b_layout = kernels::BLayout::kNK;
  bool f32_partials = false;
  int nodes = 1;
  int top_k = 0;
  int hidden = 0;
  int features = 0;
  int tokens = 0;
  const void* y[kRanksMax] = {};        ///< by rank: [rows][I]
  const void* weights[kRanksMax] = {};  ///< by rank: of its experts
  const CombineSlot* slots = nullptr;   ///< [tokens][top_k]
  const void* residual = nullptr;       ///< [tokens][H], or null
  const void* out = nullptr;            ///< [tokens][H]
};

/// Compares every element. Where the exact one is NaN, it must be; a token without rows must be 0,
/// or its residual, bit by bit.
Verdict judge_combine(const CombineProblem& problem, cudaStream_t stream);

}  // namespace mk::test
