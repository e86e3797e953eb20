#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "tests/gpu/gemm_reference.h"
#include "tests/gpu/summed_reference.h"

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
  SummedProduct product;
  product.dtype = problem.dtype == DType::kBf16 ? kernels::DType::kBf16 : kernels::DType::kF16;
  product.b_layout =
      problem.b_layout == BLayout::kNK ? kernels::BLayout::kNK : kernels::BLayout::kKN;
  product.m = row_end - row_begin;
  product.n = problem.n;
  product.k[0] = problem.k;
  const auto rows = [&](const void* matrix, int columns) {
    return static_cast<const std::uint16_t*>(matrix) + std::int64_t{row_begin} * columns;
  };
  product.a[0] = rows(problem.a, problem.k);
  product.b[0] = problem.b;
  Verdict verdict = judge_sum(product, rows(problem.c, problem.n), problem.n, stream);
  if (verdict.first_bad >= 0) verdict.first_bad += std::int64_t{row_begin} * problem.n;
  return verdict;
}

}  // namespace mk::test
