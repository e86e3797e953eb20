/// \file
/// The online softmax of the two rows that a thread has a part of, and what it does to scores and
/// outputs in registers.
///
/// In an accumulator of a warpgroup's wgmma, thread t has of rows t / 4 % 8 + 16 (t / 32) and that
/// plus 8 the columns 2 (t % 4) and the next one of every 8: registers 4 n and 4 n + 1 of the first
/// row, 4 n + 2 and 4 n + 3 of the second. The four threads of a quad share both rows.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace mk::kernels::cuda {

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Two values rounded to nearest even, the first in the low half.
template <class Element>
__device__ __forceinline__ std::uint32_t pack_pair(float low, float high) {
  std::uint32_t packed;
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

/// Hides scores: of the thread's row r, keys from limit[r] on, counted from the tile's first key.
template <int kScores>
__device__ __forceinline__ void hide_scores(float (&s)[kScores], int limit0, int limit1) {
  const int first = 2 * (threadIdx.x % 4);
  limit0 -= first;
  limit1 -= first;
#pragma unroll
  for (int n = 0; n < kScores / 4; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (8 * n + i >= limit0) s[4 * n + i] = -INFINITY;
      if (8 * n + i >= limit1) s[4 * n + 2 + i] = -INFINITY;
    }
  }
}

/// State of the thread's two rows. Scores are counted in units of ln 2. All weights are relative to
/// `top`: the largest score times scale * log2(e), rounded, of the first tile, or of a later one
/// that goes kSlack beyond. So it rarely changes, and what came before is rarely to be scaled.
struct RowSums {
  /// Weights are at most 2 to this, which 16 bits hold as well as 1.
  static constexpr float kSlack = 8;

  float top[2];
  float sum[2];  ///< of this thread's weights

  /// A tile's weights are relative to this.
  struct Raised {
    float factor[2];    ///< of what came before; not of an item's first tile
    float relative[2];  ///< top, or 0 for rows that see no key yet
  };
  /// Takes in a tile's scores: of an item's first tile if kFirst. Rows may see no key (kMasked).
  template <bool kFirst, bool kMasked, int kScores>
  __device__ __forceinline__ Raised raise(const float (&s)[kScores], float scale_log2) {
    float largest[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      largest[r] = s[2 * r];
#pragma unroll
      for (int n = 0; n < kScores / 4; ++n) {
        largest[r] = fmaxf(largest[r], fmaxf(s[4 * n + 2 * r], s[4 * n + 2 * r + 1]));
      }
      largest[r] = fmaxf(largest[r], __shfl_xor_sync(0xffffffff, largest[r], 1));
      largest[r] = fmaxf(largest[r], __shfl_xor_sync(0xffffffff, largest[r], 2));
      largest[r] *= scale_log2;
    }
    Raised raised;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float before = kFirst ? 0.0f : top[r];
      if (kFirst || largest[r] > before + kSlack) top[r] = largest[r];
      raised.relative[r] = kMasked && top[r] == -INFINITY ? 0.0f : top[r];
      if constexpr (kFirst) {
        sum[r] = 0;
      } else {
        raised.factor[r] = exp2_approx(before - raised.relative[r]);
        sum[r] *= raised.factor[r];
      }
    }
    return raised;
  }
  /// Turns scores kBegin to kEnd of the tile's into weights, 2^(score * scale_log2 - top). They are
  /// counted row by row.
  template <int kBegin, int kEnd, int kScores>
  __device__ __forceinline__ void weigh(float (&s)[kScores], float scale_log2,
                                        const Raised& raised) {
#pragma unroll
    for (int i = kBegin; i < kEnd; ++i) {
      float& value = s[place_of<kScores>(i)];
      value = exp2_approx(fmaf(value, scale_log2, -raised.relative[row_of<kScores>(i)]));
    }
#pragma unroll
    for (int i = kBegin; i < kEnd; ++i) sum[row_of<kScores>(i)] += s[place_of<kScores>(i)];
  }

 private:
  template <int kScores>
  static __device__ constexpr int row_of(int i) {
    return i / (kScores / 2);
  }
  template <int kScores>
  static __device__ constexpr int place_of(int i) {
    return i % (kScores / 2) / 2 * 4 + 2 * row_of<kScores>(i) + i % 2;
  }
};

__device__ __forceinline__ float sum_of_quad(float part) {
  part += __shfl_xor_sync(0xffffffff, part, 1);
  return part + __shfl_xor_sync(0xffffffff, part, 2);
}

/// Multiplies the thread's two rows by a factor each, which is mostly 1. All threads of a warp call
/// it together.
template <int kOutputs>
__device__ __forceinline__ void scale_rows(float (&o)[kOutputs], const float (&factor)[2]) {
  if (!__any_sync(0xffffffff, factor[0] != 1 || factor[1] != 1)) return;
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) o[i] *= factor[i / 2 % 2];
}

/// Weights as the A operand of the second product.
template <class Element, int kScores>
__device__ __forceinline__ void pack_weights(const float (&s)[kScores],
                                             std::uint32_t (&p)[kScores / 2]) {
#pragma unroll
  for (int i = 0; i < kScores / 2; ++i) p[i] = pack_pair<Element>(s[2 * i], s[2 * i + 1]);
}

/// Hands out row kRow of the thread's two, times a factor, by runs of 16 bytes: put(column, uint4).
/// The quad's threads exchange what they have (a 4 x 4 transpose), so that each puts whole runs and
/// the four of them 64 bytes that follow each other. All threads of a warp call it together.
template <class Element, int kRow, int kOutputs, class Put>
__device__ __forceinline__ void hand_out_row(const float (&o)[kOutputs], float factor, Put put) {
  const int quad = threadIdx.x % 4;
  const bool odd = quad & 1;
  const bool upper = quad & 2;
#pragma unroll
  for (int block = 0; block < kOutputs / 16; ++block) {
    std::uint32_t w[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = (block * 4 + j) * 4 + 2 * kRow;
      w[j] = pack_pair<Element>(o[i] * factor, o[i + 1] * factor);
    }
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      const std::uint32_t other = __shfl_xor_sync(0xffffffff, odd ? w[j] : w[j + 1], 1);
      w[j] = odd ? other : w[j];
      w[j + 1] = odd ? w[j + 1] : other;
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const std::uint32_t other = __shfl_xor_sync(0xffffffff, upper ? w[j] : w[j + 2], 2);
      w[j] = upper ? other : w[j];
      w[j + 2] = upper ? w[j + 2] : other;
    }
    put(block * 32 + quad * 8, make_uint4(w[0], w[1], w[2], w[3]));
  }
}

}  // namespace mk::kernels::cuda
