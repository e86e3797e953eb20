#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "tests/gpu/grouped_reference.h"

namespace mk::test {

using kernels::cuda::BLayout;
using kernels::cuda::DType;
using kernels::cuda::GroupedActivation;
using kernels::cuda::GroupedGemmProblem;

namespace {

__device__ double to_double(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ double to_double(__half value) { return __half2float(value); }

struct DeviceVerdict {
  unsigned long long worst_bits;  // of non-negative doubles, which order like their bits
  unsigned long long error_bits;
  unsigned long long bad;
  long long first_bad;
  unsigned long long touched;
};

/// A value, and how far a right kernel's may be from it.
struct Bounded {
  double exact;
  double error;
};

__device__ int expert_of(const GroupedGemmProblem& p, std::int64_t row) {
  for (int e = 0; e < p.experts; ++e) {
    const std::int64_t begin = p.offsets[e];
    const std::int64_t end = p.counts != nullptr ? begin + p.counts[e] : p.offsets[e + 1];
    if (row >= begin && row < end) return e;
  }
  return -1;
}

template <class Element>
__device__ Bounded sum_of(const GroupedGemmProblem& p, int expert, std::int64_t row, int column) {
  const auto* a = static_cast<const Element*>(p.a) + row * p.k;
  const auto* b = static_cast<const Element*>(p.b) + std::int64_t{expert} * p.n * p.k;
  const bool nk = p.b_layout == BLayout::kNK;
  double sum = 0, magnitude = 0;
  for (int k = 0; k < p.k; ++k) {
    const double term =
        to_double(a[k]) *
        to_double(b[nk ? std::int64_t{column} * p.k + k : std::int64_t{k} * p.n + column]);
    sum += term;
    magnitude += fabs(term);
  }
  double error = 1.01 * 0x1p-22 * (p.k / 16.0 + 2.0) * magnitude + p.k * 0x1p-126;
  if (p.bias != nullptr) {
    sum += to_double(static_cast<const Element*>(p.bias)[std::int64_t{expert} * p.n + column]);
    error += 0x1p-24 * (fabs(sum) + error);
  }
  return {sum, error};
}

template <class Element>
__global__ void judge_kernel(const GroupedGemmProblem p, std::int64_t rows_stored, int columns,
                             double unit, double tiny, DeviceVerdict* verdict) {
  const std::int64_t row = blockIdx.y + std::int64_t{blockIdx.z} * gridDim.y;
  const int column = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (row >= rows_stored || column >= columns) return;
  const auto* c = static_cast<const Element*>(p.c) + row * columns + column;
  const int expert = row < p.rows_max ? expert_of(p, row) : -1;
  if (expert < 0) {
    if (*reinterpret_cast<const std::uint16_t*>(c) != 0xffff) atomicAdd(&verdict->touched, 1ull);
    return;
  }
  Bounded x;
  if (p.activation == GroupedActivation::kNone) {
    x = sum_of<Element>(p, expert, row, column);
  } else {
    const bool halves = p.activation == GroupedActivation::kGatedSiluHalves;
    const Bounded g = sum_of<Element>(p, expert, row, halves ? column : 2 * column);
    const Bounded up = sum_of<Element>(p, expert, row, halves ? p.n / 2 + column : 2 * column + 1);
    const double silu = g.exact / (1 + exp(-g.exact));
    const double error = 1.1 * g.error + 0x1p-23 * (8 + 1.2 * (fabs(g.exact) + g.error)) *
                                             (fabs(silu) + 1.1 * g.error);
    x.exact = silu * up.exact;
    x.error = error * fabs(up.exact) + (fabs(silu) + error) * up.error;
    x.error += 0x1p-24 * (fabs(x.exact) + x.error);
  }
  if (p.row_scale != nullptr) {
    const double scale = p.row_scale[row];
    x.exact *= scale;
    x.error *= fabs(scale);
    x.error += 0x1p-24 * (fabs(x.exact) + x.error);
  }
  x.error += unit * (fabs(x.exact) + x.error) + tiny;
  const double value = to_double(*c);
  const double error = fabs(value - x.exact);
  const bool right = isnan(x.exact) ? isnan(value) : error <= x.error;
  if (!right) {
    atomicAdd(&verdict->bad, 1ull);
    atomicMax(&verdict->first_bad, static_cast<long long>(row * columns + column));
  }
  if (isnan(x.exact)) return;
  const double worst = isfinite(error) ? error / x.error : 1e300;
  atomicMax(&verdict->worst_bits, static_cast<unsigned long long>(__double_as_longlong(worst)));
  atomicMax(&verdict->error_bits,
            static_cast<unsigned long long>(__double_as_longlong(isfinite(error) ? error : 1e300)));
}

__global__ void scales_kernel(float* elements, std::int64_t count, std::uint64_t seed) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += step) {
    std::uint64_t bits = (seed + static_cast<std::uint64_t>(i)) * 0x9e3779b97f4a7c15ull;
    bits = (bits ^ (bits >> 31)) * 0xbf58476d1ce4e5b9ull;
    elements[i] = 0.25f + static_cast<float>(bits >> 40) * 0x1p-24f;
  }
}

}  // namespace

GroupedVerdict judge_grouped(const GroupedGemmProblem& problem, std::int64_t rows_stored,
                             cudaStream_t stream) {
  const DeviceMemory memory(sizeof(DeviceVerdict));
  DeviceVerdict verdict{0, 0, 0, -1, 0};
  require(cudaMemcpyAsync(memory.data(), &verdict, sizeof verdict, cudaMemcpyHostToDevice, stream),
          "verdict");
  constexpr unsigned kThreads = 128;
  const int columns = problem.activation == GroupedActivation::kNone ? problem.n : problem.n / 2;
  const auto rows = static_cast<unsigned>(rows_stored);
  const dim3 grid((static_cast<unsigned>(columns) + kThreads - 1) / kThreads,
                  rows < 32768 ? rows : 32768, (rows + 32767) / 32768);
  auto* const device = static_cast<DeviceVerdict*>(memory.data());
  // Half of the least subnormal, and what exp() loses where silu is next to nothing.
  if (problem.dtype == DType::kBf16) {
    judge_kernel<__nv_bfloat16>
        <<<grid, kThreads, 0, stream>>>(problem, rows_stored, columns, 0x1p-8, 0x1p-110, device);
  } else {
    judge_kernel<__half>
        <<<grid, kThreads, 0, stream>>>(problem, rows_stored, columns, 0x1p-11, 0x1p-25, device);
  }
  require(cudaGetLastError(), "judge_grouped");
  require(cudaMemcpyAsync(&verdict, memory.data(), sizeof verdict, cudaMemcpyDeviceToHost, stream),
          "verdict");
  require(cudaStreamSynchronize(stream), "judge_grouped");
  const auto value = [](unsigned long long bits) {
    double number;
    static_assert(sizeof number == sizeof bits);
    __builtin_memcpy(&number, &bits, sizeof number);
    return number;
  };
  GroupedVerdict result;
  result.rows.worst = value(verdict.worst_bits);
  result.rows.error_max = value(verdict.error_bits);
  result.rows.bad = static_cast<std::int64_t>(verdict.bad);
  result.rows.first_bad = verdict.first_bad;
  result.touched = static_cast<std::int64_t>(verdict.touched);
  return result;
}

void fill_scales(float* elements, std::int64_t count, std::uint64_t seed, cudaStream_t stream) {
  scales_kernel<<<256, 256, 0, stream>>>(elements, count, seed);
  require(cudaGetLastError(), "fill_scales");
}

}  // namespace mk::test
