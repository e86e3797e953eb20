#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "tests/gpu/combine_reference.h"

namespace mk::test {
namespace {

__device__ double to_double(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ double to_double(__half value) { return __half2float(value); }

struct DeviceVerdict {
  unsigned long long worst_bits;  // of non-negative doubles, which order like their bits
  unsigned long long error_bits;
  unsigned long long bad;
  long long first_bad;
};

/// Of an element type: its unit roundoff, and half of its least spacing.
struct Rounding {
  double unit;
  double tiny;
};

template <class Element>
__global__ void judge_kernel(const CombineProblem p, Rounding element, Rounding partial,
                             DeviceVerdict* verdict) {
  const std::int64_t token = blockIdx.y + std::int64_t{blockIdx.z} * gridDim.y;
  const int column = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (token >= p.tokens || column >= p.hidden) return;
  const std::int64_t at = token * p.hidden + column;
  double exact = 0;
  double size = 0;  // the README's A
  bool any = false;
  for (int s = 0; s < p.top_k; ++s) {
    const CombineSlot slot = p.slots[token * p.top_k + s];
    if (slot.rank < 0) continue;
    any = true;
    const std::int64_t features = p.features;
    const auto* row = static_cast<const Element*>(p.y[slot.rank]) + slot.row * features;
    const auto* weights =
        static_cast<const Element*>(p.weights[slot.rank]) + slot.expert * features * p.hidden;
    const bool nk = p.b_layout == kernels::BLayout::kNK;
    double sum = 0;
    double magnitude = 0;
    for (std::int64_t i = 0; i < features; ++i) {
      const double term = to_double(row[i]) *
                          to_double(weights[nk ? column * features + i : i * p.hidden + column]);
      sum += term;
      magnitude += fabs(term);
    }
    exact += slot.weight * sum;
    size += fabs(static_cast<double>(slot.weight)) * magnitude;
  }
  const auto* out = static_cast<const Element*>(p.out) + at;
  const auto* residual =
      p.residual == nullptr ? nullptr : static_cast<const Element*>(p.residual) + at;
  const double value = to_double(*out);
  double bound = 0;
  bool right;
  if (!any) {
    const std::uint16_t bits =
        residual == nullptr ? 0 : *reinterpret_cast<const std::uint16_t*>(residual);
    right = *reinterpret_cast<const std::uint16_t*>(out) == bits;
    exact = residual == nullptr ? 0 : to_double(*residual);
  } else {
    if (residual != nullptr) {
      exact += to_double(*residual);
      size += fabs(to_double(*residual));
    }
    const double n = p.features + p.top_k + p.nodes + 1;
    const double gamma = n * 0x1p-24 / (1 - n * 0x1p-24);
    const double partials = (1 + partial.unit) * (1 + partial.unit);
    const double before = ((1 + gamma) * partials - 1) * size + (p.top_k + p.nodes) * partial.tiny;
    bound = before + element.unit * (fabs(exact) + before) + element.tiny;
    right = isnan(exact) ? isnan(value) : fabs(value - exact) <= bound;
  }
  if (!right) {
    atomicAdd(&verdict->bad, 1ull);
    atomicMax(&verdict->first_bad, static_cast<long long>(at));
  }
  if (isnan(exact) || !any) return;
  const double error = isfinite(value) ? fabs(value - exact) : 1e300;
  atomicMax(&verdict->worst_bits, static_cast<unsigned long long>(
                                      __double_as_longlong(error < 1e300 ? error / bound : error)));
  atomicMax(&verdict->error_bits, static_cast<unsigned long long>(__double_as_longlong(error)));
}

}  // namespace

Verdict judge_combine(const CombineProblem& problem, cudaStream_t stream) {
  if (problem.tokens == 0) return {};
  const DeviceMemory memory(sizeof(DeviceVerdict));
  DeviceVerdict found{0, 0, 0, -1};
  require(cudaMemcpyAsync(memory.data(), &found, sizeof found, cudaMemcpyHostToDevice, stream),
          "verdict");
  constexpr unsigned kThreads = 128;
  const auto tokens = static_cast<unsigned>(problem.tokens);
  const dim3 grid((static_cast<unsigned>(problem.hidden) + kThreads - 1) / kThreads,
                  tokens < 32768 ? tokens : 32768, (tokens + 32767) / 32768);
  auto* const device = static_cast<DeviceVerdict*>(memory.data());
  const bool bf16 = problem.dtype == kernels::DType::kBf16;
  const Rounding element = bf16 ? Rounding{0x1p-8, 0x1p-134} : Rounding{0x1p-11, 0x1p-25};
  const Rounding partial = problem.f32_partials ? Rounding{0, 0x1p-150} : element;
  if (bf16) {
    judge_kernel<__nv_bfloat16><<<grid, kThreads, 0, stream>>>(problem, element, partial, device);
  } else {
    judge_kernel<__half><<<grid, kThreads, 0, stream>>>(problem, element, partial, device);
  }
  require(cudaGetLastError(), "judge_combine");
  require(cudaMemcpyAsync(&found, memory.data(), sizeof found, cudaMemcpyDeviceToHost, stream),
          "verdict");
  require(cudaStreamSynchronize(stream), "judge_combine");
  const auto value = [](unsigned long long bits) {
    double number;
    static_assert(sizeof number == sizeof bits);
    __builtin_memcpy(&number, &bits, sizeof number);
    return number;
  };
  Verdict verdict;
  verdict.worst = value(found.worst_bits);
  verdict.error_max = value(found.error_bits);
  verdict.bad = static_cast<std::int64_t>(found.bad);
  verdict.first_bad = found.first_bad;
  return verdict;
}

}  // namespace mk::test
