/// \file
/// What epilogues do with fp32 sums before they are rounded: bias and activations, one thread's
/// part. The sums are as the core has them (gemm_policies.cuh, Epilogue).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/core/ptx.cuh"

namespace mk::kernels::cuda {

/// g / (1 + e^-g). Relative error at most (8 + 1.2 |g|) 2^-23.
__device__ __forceinline__ float silu(float g) { return __fdividef(g, 1.0f + __expf(-g)); }

/// A NaN stays one.
__device__ __forceinline__ float relu(float x) { return x < 0.0f ? 0.0f : x; }

/// x P(X <= x) for a standard normal X. With t = |x| / sqrt(2), erfc(t) is e^-t^2 times a
/// polynomial in 1 / (1 + p t), off by 1.5e-7 at most (Abramowitz and Stegun, 7.1.26). The result
/// is off by at most 2^-20 |x|.
__device__ __forceinline__ float gelu(float x) {
  const float t = fabsf(x) * 0.70710678f;
  const float k = __fdividef(1.0f, fmaf(0.3275911f, t, 1.0f));
  float sum = fmaf(1.061405429f, k, -1.453152027f);
  sum = fmaf(sum, k, 1.421413741f);
  sum = fmaf(sum, k, -0.284496736f);
  sum = fmaf(sum, k, 0.254829592f);
  const float tail = 0.5f * sum * k * __expf(-t * t);  // P(X > |x|)
  return x * (x < 0.0f ? tail : 1.0f - tail);
}

/// Two elements. The compiler leaves the load where it stands: moved up, many at a time would take
/// registers that the sums need.
__device__ __forceinline__ std::uint32_t load_two_in_place(const std::uint16_t* from) {
  std::uint32_t two;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(two) : "l"(from));
  return two;
}

/// Two sums rounded to nearest even, the first in the low half.
template <class Element>
__device__ __forceinline__ std::uint32_t pack_two(float low, float high) {
  std::uint32_t packed;
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

/// The two elements of a word, the low half first.
template <class Element>
__device__ __forceinline__ void unpack_two(std::uint32_t packed, float* low, float* high) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    *low = __uint_as_float(packed << 16);
    *high = __uint_as_float(packed & 0xffff0000u);
  } else {
    const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&packed));
    *low = pair.x;
    *high = pair.y;
  }
}

/// Adds to a thread's four sums of eight columns the bias of its two, which begins at `bias`.
template <class Element>
__device__ __forceinline__ void add_two_biases(float* v, const std::uint16_t* bias) {
  float low, high;
  unpack_two<Element>(load_two_in_place(bias), &low, &high);
  v[0] += low;
  v[1] += high;
  v[2] += low;
  v[3] += high;
}

/// Where gates and ups lie side by side, a thread has of eight columns of sums one of C, where it
/// should have two that follow each other. It gets them from its quad: lane t has columns t (low)
/// and 4 + t of eight. Answers columns 2 t and 2 t + 1.
__device__ __forceinline__ std::uint32_t pairs_from_quad(std::uint32_t mine) {
  const int t = threadIdx.x % 4;
  const std::uint32_t first = __shfl_sync(0xffffffffu, mine, 2 * t % 4, 4);
  const std::uint32_t second = __shfl_sync(0xffffffffu, mine, 2 * t % 4 + 1, 4);
  return __byte_perm(first, second, t < 2 ? 0x5410 : 0x7632);
}

/// Of a thread's sums of 16 columns, gates and their ups, what it stores of C's 8 columns:
/// packed[0] is its first row's two, packed[1] those of 8 below, each multiplied by its row's
/// scale.
template <class Element>
__device__ __forceinline__ void pack_silu_pairs(float* v, const float (&scale)[2],
                                                std::uint32_t* packed) {
#pragma unroll
  for (int i = 0; i < 4; ++i) v[2 * i] = silu(v[2 * i]) * v[2 * i + 1];
#pragma unroll
  for (int row = 0; row < 2; ++row)
    packed[row] =
        pairs_from_quad(pack_two<Element>(v[2 * row] * scale[row], v[2 * row + 4] * scale[row]));
}

}  // namespace mk::kernels::cuda
