/// \file
/// How the operators on GPUs are judged: float64 on the GPU, with a bound for every element.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/comm/epilogue.h"
#include "kernels/comm/types.h"
#include "shm/limits.h"
#include "tests/gpu/gemm_reference.h"

namespace mk::test {

/// A sum of products over ranks, node by node; one rank: a plain product. All memory reachable from
/// the current device.
struct SummedProduct {
  static constexpr int kRanksMax = 16;
  kernels::DType dtype = kernels::DType::kBf16;
  kernels::BLayout b_layout = kernels::BLayout::kNK;
  int m = 0;
  int n = 0;
  int nodes = 1;
  int locals = 1;
  int k[kRanksMax] = {};
  kernels::GemmResult result;
  const void* bias = nullptr;  ///< n elements, if the result has one
  int a_gap = 0;               ///< elements between the end of a row and the next one
  int b_gap = 0;               ///< of what lies in a row of B, as it lies
  const void* a[kRanksMax] = {};
  const void* b[kRanksMax] = {};
};

/// Compares every element of `c` (rows `ldc` apart) with the float64 sum of products. The bound is
/// that of kernels/ops/gemm_ar/README.md, in which the error of a dot product is that of fp32 sums
/// on tensor cores, which add 16 products at a time and truncate: d = s 2^-22 (k/16 + 2) sum
/// |a||b|, s = 1.01 of slack. So of one rank: d + u (|ref| + d), u = 2^-8 for bf16 and 2^-11 for
/// f16. Bias and activation: as there.
Verdict judge_sum(const SummedProduct& product, const void* c, int ldc, cudaStream_t stream);

/// NaN into what lies between rows of `length` elements, `gap` elements after each.
void poison_gaps(void* elements, std::int64_t rows, std::int64_t length, std::int64_t gap,
                 cudaStream_t stream);
/// Elements there that are not as poison_gaps left them.
std::int64_t count_touched_gaps(const void* elements, std::int64_t rows, std::int64_t length,
                                std::int64_t gap, cudaStream_t stream);

/// Elements that differ in their bits.
std::int64_t count_different(const void* x, const void* y, std::int64_t count, cudaStream_t stream);
/// Of `rows` rows of `length`, which begin so many elements apart.
std::int64_t count_different_rows(const void* x, std::int64_t ldx, const void* y, std::int64_t ldy,
                                  std::int64_t rows, std::int64_t length, cudaStream_t stream);

/// Keeps the stream busy for so long, on one SM.
void delay(std::uint64_t ns, cudaStream_t stream);

/// What the reduce half of an unfused all-reduce does on one GPU, as one kernel on all of it:
/// outs[*] = round(parts[0] + parts[1] + ...), `count` bf16 elements (a multiple of 8), every one
/// of `ranks` parts read once and every out written once.
struct AllReduceParts {
  int ranks = 0;
  const void* parts[shm::kLocalRanksMax] = {};
  void* outs[shm::kLocalRanksMax] = {};
};
void all_reduce(const AllReduceParts& parts, std::int64_t count, cudaStream_t stream);

}  // namespace mk::test
