/// \file
/// How attention on GPUs is judged: float64 on the GPU, with a bound for every element of O and
/// LSE.
///
/// For one query and the keys j it sees: t_j = scale q.k_j, w_j = exp(t_j) / sum exp(t), O = sum
/// w_j v_j, LSE = ln sum exp(t). The kernel works in fp32 over T tiles of at most B keys. Relative
/// to the exact weight, and up to what all weights of a row have in common, its weight has the
/// error e_j <= exp(x_j) - 1, of
///
///  1. the score: fp32 sums on tensor cores, which add 16 products at a time and truncate:
///     d_j = scale 1.01 2^-22 (D/16 + 2) sum |q||k_j|;
///  2. the exponent, score * c - top in one rounding, of c = scale * log2(e) within 2^-23: at most
///     2^-22 (max t - t_j) + 2^-21 (top is up to 8 below the largest score * c), the largest d of
///     the row included with d_j; 2^x within 2^-21;
///  3. what later tiles multiply it by: T factors within 2^-21 and as many roundings.
///
/// So x_j = d_j + max d + 2^-22 (max t - t_j) + (T + 2) 2^-20. The sum of weights adds (B/4 + T +
/// 4) 2^-23. The second product rounds weights to 16 bits, u each (2^-8 for bf16, 2^-11 for f16,
/// there 2^-25 at least), and adds as in 1.: 1.01 2^-22 (n/16 + 2 + T). With G the sum of these
/// two,
///
///     |O' - O| <= sum w_j e_j |v_j| + (u + G) sum w_j |v_j| + |O| (sum w_j e_j + G)
///                 + [f16] 2^-25 sum of |v_j| / (sum of exp(t_j - max t))
///
/// times 1.05 for second-order terms, then O' is rounded: + u (|O| + that). LSE has the error of
/// its weights' sum, of what the rows have in common (max d + 2^-22 |max t|), and 2^-22 (|LSE| +
/// 1).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/core/attention_types.h"
#include "tests/gpu/gemm_reference.h"

namespace mk::test {

struct AttentionVerdict {
  Verdict o;
  Verdict lse;
  bool right() const { return o.right() && lse.right(); }
};

/// Compares every element of problem.o and problem.lse, of queries row_begin to row_end of all
/// heads. Where the float64 result is not finite, ours must be the same kind of it. `runs`: the
/// keys come in so many runs, each of which may end with a tile of fewer keys.
AttentionVerdict judge_attention(const kernels::cuda::AttentionProblem& problem, int tile_keys,
                                 int row_begin, int row_end, cudaStream_t stream, int runs = 1);

}  // namespace mk::test
