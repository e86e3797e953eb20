#include "tests/gpu/partial_attention.h"

#include <cuda_bf16.h>

#include <cmath>

#include "tests/gpu/gemm_reference.h"

namespace mk::test {
namespace {

constexpr int kThreads = 256;
constexpr int kLanes = 16;  ///< threads of a row of one head

struct Partials {
  PartialAttention of[kPartialsMax];
  int count;
};

/// Each lane has kDim / kLanes neighbouring elements.
template <int kDim>
__global__ void __launch_bounds__(kThreads)
    merge_kernel(const __grid_constant__ MergedAttention merged,
                 const __grid_constant__ Partials partials) {
  constexpr int kPairs = kDim / kLanes / 2;
  const std::int64_t rows = merged.rows;
  const std::int64_t item =
      (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) / kLanes;  // batch, row, head
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  if (item >= merged.batch * rows * merged.heads) return;
  const std::int64_t head = item % merged.heads;
  const std::int64_t row = item / merged.heads % rows;
  const std::int64_t batch = item / merged.heads / rows;
  const auto there = [&](const PartialAttention& partial) {
    return row >= partial.first && row < partial.first + partial.rows;
  };
  const auto lse_of = [&](const PartialAttention& partial) {
    return partial.lse[(batch * merged.heads + head) * partial.rows + row - partial.first];
  };
  float top = -INFINITY;
  for (int i = 0; i < partials.count; ++i) {
    if (there(partials.of[i])) top = fmaxf(top, lse_of(partials.of[i]));
  }
  float weights = 0;
  float2 sums[kPairs] = {};
  for (int i = 0; i < partials.count; ++i) {
    const PartialAttention& partial = partials.of[i];
    if (!there(partial)) continue;
    const float weight = __expf(lse_of(partial) - top);
    weights += weight;
    const auto* from =
        static_cast<const __nv_bfloat162*>(partial.o) +
        ((batch * partial.rows + row - partial.first) * merged.heads + head) * (kDim / 2) +
        lane * kPairs;
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const float2 values = __bfloat1622float2(from[pair]);
      sums[pair].x += weight * values.x;
      sums[pair].y += weight * values.y;
    }
  }
  auto* to = static_cast<__nv_bfloat162*>(merged.o) + item * (kDim / 2) + lane * kPairs;
#pragma unroll
  for (int pair = 0; pair < kPairs; ++pair)
    to[pair] = __floats2bfloat162_rn(sums[pair].x / weights, sums[pair].y / weights);
}

}  // namespace

void merge(const MergedAttention& merged, const PartialAttention* partials, int count,
           cudaStream_t stream) {
  Partials all{};
  all.count = count < kPartialsMax ? count : kPartialsMax;
  for (int i = 0; i < all.count; ++i) all.of[i] = partials[i];
  const std::int64_t threads = merged.batch * merged.rows * merged.heads * kLanes;
  const auto blocks = static_cast<unsigned>((threads + kThreads - 1) / kThreads);
  if (merged.dim == 64) {
    merge_kernel<64><<<blocks, kThreads, 0, stream>>>(merged, all);
  } else {
    merge_kernel<128><<<blocks, kThreads, 0, stream>>>(merged, all);
  }
  require(cudaGetLastError(), "merge");
}

}  // namespace mk::test
