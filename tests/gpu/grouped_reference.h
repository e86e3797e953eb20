/// \file
/// How grouped products on GPUs are judged: float64 on the GPU, with a bound for every element.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/core/grouped_types.h"
#include "tests/gpu/gemm_reference.h"

namespace mk::test {

struct GroupedVerdict {
  Verdict rows;              ///< of the elements of all experts' rows
  std::int64_t touched = 0;  ///< elements of other rows, up to rows_stored, that are not poisoned
  bool right() const { return rows.right() && touched == 0; }
};

/// Compares every element of problem.c, which was poisoned and has memory for `rows_stored` rows,
/// with the float64 result. Where that is NaN, C must be. The bound, step by step, with
/// s = 1.01 of slack and u = 2^-8 for bf16 and 2^-11 for f16 (half a unit in the last place):
///
///     dot product      d = s 2^-22 (k / 16 + 2) sum |a||b|      (summed_reference.h)
///     plus bias        d + 2^-24 (|x| + d)
///     silu             |silu'| < 1.1, and silu() in the kernel is off by (8 + 1.2 |g|) 2^-23 of
///     it:
///                      e = 1.1 d + 2^-23 (8 + 1.2 (|g| + d)) (|silu(g)| + 1.1 d)
///     times up         e |up| + (|silu| + e) d_up, and 2^-24 of the product
///     times scale      its |scale|-fold, and 2^-24 of the product
///     rounded          u (|exact| + error), and half the least subnormal
GroupedVerdict judge_grouped(const kernels::cuda::GroupedGemmProblem& problem,
                             std::int64_t rows_stored, cudaStream_t stream);

/// Fills `count` fp32 elements with values between 0.25 and 1.25 drawn from `seed`.
void fill_scales(float* elements, std::int64_t count, std::uint64_t seed, cudaStream_t stream);

}  // namespace mk::test
