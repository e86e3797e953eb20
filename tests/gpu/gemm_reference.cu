#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "tests/gpu/gemm_reference.h"

namespace mk::test {

using kernels::cuda::BLayout;
using kernels::cuda::DType;
using kernels::cuda::GemmProblem;

namespace {

__device__ std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

__device__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ float to_float(__half value) { return __half2float(value); }
__device__ void from_float(float value, __nv_bfloat16* to) { *to = __float2bfloat16(value); }
__device__ void from_float(float value, __half* to) { *to = __float2half(value); }

template <class Element>
__global__ void fill_kernel(Element* elements, std::int64_t count, std::uint64_t seed) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += step) {
    const std::uint64_t bits = mix(mix(seed) ^ static_cast<std::uint64_t>(i));
    const float u = (static_cast<float>(bits >> 40) + 0.5f) * 0x1p-24f;
    const float v = static_cast<float>(bits & 0xffffff) * 0x1p-24f;
    from_float(sqrtf(-2.0f * logf(u)) * cospif(2.0f * v), &elements[i]);
  }
}

struct DeviceVerdict {
  unsigned long long worst_bits;  // of non-negative doubles, which order like their bits
  unsigned long long error_bits;
  unsigned long long bad;
  long long first_bad;
};

constexpr int kTile = 64;
constexpr int kStep = 16;

/// 64 x 64 outputs per block of 256 threads, 4 x 4 per thread, plain float64 multiply-adds.
template <class Element>
__global__ void __launch_bounds__(256)
    judge_kernel(const Element* a, const Element* b, const Element* c, int row_begin, int row_end,
                 int n, int k, bool b_is_nk, double unit, DeviceVerdict* verdict) {
  __shared__ double a_tile[kStep][kTile + 2];
  __shared__ double b_tile[kStep][kTile + 2];
  const int m0 = row_begin + blockIdx.y * kTile;
  const int n0 = blockIdx.x * kTile;
  const int tx = threadIdx.x % 16;
  const int ty = threadIdx.x / 16;
  double sum[4][4] = {};
  float magnitude[4][4] = {};
  for (int k0 = 0; k0 < k; k0 += kStep) {
    for (int i = threadIdx.x; i < kTile * kStep; i += 256) {
      const int kk = i % kStep;
      const int row = i / kStep;
      a_tile[kk][row] = m0 + row < row_end && k0 + kk < k
                            ? to_float(a[static_cast<std::int64_t>(m0 + row) * k + k0 + kk])
                            : 0.0;
      const int bk = b_is_nk ? kk : i / kTile;
      const int column = b_is_nk ? row : i % kTile;
      const std::int64_t at = b_is_nk ? static_cast<std::int64_t>(n0 + column) * k + k0 + bk
                                      : static_cast<std::int64_t>(k0 + bk) * n + n0 + column;
      b_tile[bk][column] = n0 + column < n && k0 + bk < k ? to_float(b[at]) : 0.0;
    }
    __syncthreads();
#pragma unroll
    for (int kk = 0; kk < kStep; ++kk) {
      double av[4], bv[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        av[i] = a_tile[kk][ty * 4 + i];
        bv[i] = b_tile[kk][tx * 4 + i];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          sum[i][j] += av[i] * bv[j];
          magnitude[i][j] += fabsf(static_cast<float>(av[i]) * static_cast<float>(bv[j]));
        }
      }
    }
    __syncthreads();
  }
  const double sum_unit = 1.01 * 0x1p-22 * (k / 16.0 + 2.0);
  double worst = 0, error_max = 0;
  long long bad = 0, first_bad = -1;
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 4; ++j) {
      const int row = m0 + ty * 4 + i;
      const int column = n0 + tx * 4 + j;
      if (row >= row_end || column >= n) continue;
      const long long at = static_cast<long long>(row) * n + column;
      const double got = to_float(c[at]);
      const double error = fabs(got - sum[i][j]);
      const double bound = unit * fabs(sum[i][j]) + sum_unit * magnitude[i][j] + 0x1p-24;
      if (!(error <= bound)) {  // NaN lands here too
        ++bad;
        first_bad = at;
      }
      const double ratio = isfinite(error) ? error / bound : 1e300;
      worst = fmax(worst, ratio);
      error_max = fmax(error_max, isfinite(error) ? error : 1e300);
    }
  }
  atomicMax(&verdict->worst_bits, static_cast<unsigned long long>(__double_as_longlong(worst)));
  atomicMax(&verdict->error_bits, static_cast<unsigned long long>(__double_as_longlong(error_max)));
  if (bad > 0) {
    atomicAdd(&verdict->bad, static_cast<unsigned long long>(bad));
    atomicMax(&verdict->first_bad, first_bad);
  }
}

template <class Element>
void launch_judge(const GemmProblem& p, int row_begin, int row_end, double unit,
                  DeviceVerdict* verdict, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((p.n + kTile - 1) / kTile),
                  static_cast<unsigned>((row_end - row_begin + kTile - 1) / kTile));
  judge_kernel<Element>
      <<<grid, 256, 0, stream>>>(static_cast<const Element*>(p.a), static_cast<const Element*>(p.b),
                                 static_cast<const Element*>(p.c), row_begin, row_end, p.n, p.k,
                                 p.b_layout == BLayout::kNK, unit, verdict);
}

double from_bits(unsigned long long bits) {
  double value;
  static_assert(sizeof value == sizeof bits);
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace

void require(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

void fill_normal(void* elements, DType dtype, std::int64_t count, std::uint64_t seed,
                 cudaStream_t stream) {
  if (dtype == DType::kBf16) {
    fill_kernel<<<1024, 256, 0, stream>>>(static_cast<__nv_bfloat16*>(elements), count, seed);
  } else {
    fill_kernel<<<1024, 256, 0, stream>>>(static_cast<__half*>(elements), count, seed);
  }
  require(cudaGetLastError(), "fill_normal");
}

void poison(void* elements, std::int64_t count, cudaStream_t stream) {
  require(cudaMemsetAsync(elements, 0xff, static_cast<std::size_t>(count) * 2, stream), "poison");
}

Verdict judge(const GemmProblem& problem, int row_begin, int row_end, cudaStream_t stream) {
  DeviceMemory memory(sizeof(DeviceVerdict));
  auto* on_device = static_cast<DeviceVerdict*>(memory.data());
  DeviceVerdict found{0, 0, 0, -1};
  require(cudaMemcpyAsync(on_device, &found, sizeof found, cudaMemcpyHostToDevice, stream),
          "judge: verdict in");
  if (problem.dtype == DType::kBf16) {
    launch_judge<__nv_bfloat16>(problem, row_begin, row_end, 0x1p-8, on_device, stream);
  } else {
    launch_judge<__half>(problem, row_begin, row_end, 0x1p-11, on_device, stream);
  }
  require(cudaGetLastError(), "judge");
  require(cudaMemcpyAsync(&found, on_device, sizeof found, cudaMemcpyDeviceToHost, stream),
          "judge: verdict out");
  require(cudaStreamSynchronize(stream), "judge: wait");
  Verdict verdict;
  verdict.worst = from_bits(found.worst_bits);
  verdict.error_max = from_bits(found.error_bits);
  verdict.bad = static_cast<std::int64_t>(found.bad);
  verdict.first_bad = found.first_bad;
  return verdict;
}

}  // namespace mk::test
