#include "tests/gpu/summed_reference.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda/core/ptx.cuh"

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

constexpr int kTile = 64;
constexpr int kStep = 16;

/// Error of `additions` fp32 additions in any order, relative to the sum of magnitudes.
__device__ double gamma_of(int additions) {
  return additions * 0x1p-24 / (1 - additions * 0x1p-24);
}

/// A number, and how far the computed one may be from it.
struct Bounded {
  double exact;
  double error;
};

/// As kernels/ops/gemm_ar/README.md has it; `gate` and `up` are the same but for gated activations.
__device__ Bounded activated(kernels::Activation activation, const Bounded& gate,
                             const Bounded& up) {
  const double x = gate.exact;
  const double reach = fabs(x) + gate.error;
  const double silu = x / (1 + exp(-x));
  const double silu_error =
      1.1 * gate.error + (8 + 1.2 * reach) * 0x1p-23 * (fabs(silu) + 1.1 * gate.error);
  switch (activation) {
    case kernels::Activation::kRelu:
      return {fmax(x, 0.0), gate.error};
    case kernels::Activation::kGelu:
      return {x * erfc(-x / sqrt(2.0)) / 2, 1.13 * gate.error + 0x1p-20 * reach};
    case kernels::Activation::kSilu:
      return {silu, silu_error};
    case kernels::Activation::kGatedSilu: {
      const double product = silu * up.exact;
      const double error = silu_error * (fabs(up.exact) + up.error) + fabs(silu) * up.error;
      return {product, error + 0x1p-24 * (fabs(product) + error) + 0x1p-126};
    }
    default:
      return gate;
  }
}

/// 64 x 64 outputs per block of 256 threads, 4 x 4 per thread, plain float64 multiply-adds, rank by
/// rank.
template <class Element>
__global__ void __launch_bounds__(256)
    judge_kernel(const SummedProduct p, const Element* c, int ldc, double unit, double tiny,
                 DeviceVerdict* verdict) {
  __shared__ double a_tile[kStep][kTile + 2];
  __shared__ double b_tile[kStep][kTile + 2];
  const int m0 = blockIdx.y * kTile;
  const int n0 = blockIdx.x * kTile;
  const int tx = threadIdx.x % 16;
  const int ty = threadIdx.x / 16;
  // Of a sum of terms t_r, each off by e_r, the bound is a sum, too: of e_r + gamma (|t_r| + e_r).
  const double node_gamma = gamma_of(p.locals - 1);
  const double gamma = gamma_of(p.nodes - 1);
  double total[4][4] = {};       // exact
  double node_total[4][4] = {};  // of the node so far
  double node_bound[4][4] = {};
  double total_bound[4][4] = {};
  for (int rank = 0; rank < p.nodes * p.locals; ++rank) {
    const auto* a = static_cast<const Element*>(p.a[rank]);
    const auto* b = static_cast<const Element*>(p.b[rank]);
    const int k = p.k[rank];
    const bool b_is_nk = p.b_layout == kernels::BLayout::kNK;
    const std::int64_t lda = k + p.a_gap;
    const std::int64_t ldb = (b_is_nk ? k : p.n) + p.b_gap;
    double sum[4][4] = {};
    float magnitude[4][4] = {};
    for (int k0 = 0; k0 < k; k0 += kStep) {
      for (int i = threadIdx.x; i < kTile * kStep; i += 256) {
        const int kk = i % kStep;
        const int row = i / kStep;
        a_tile[kk][row] =
            m0 + row < p.m && k0 + kk < k ? to_double(a[(m0 + row) * lda + k0 + kk]) : 0.0;
        const int bk = b_is_nk ? kk : i / kTile;
        const int column = b_is_nk ? row : i % kTile;
        const std::int64_t at =
            b_is_nk ? (n0 + column) * ldb + k0 + bk : (k0 + bk) * ldb + n0 + column;
        b_tile[bk][column] = n0 + column < p.n && k0 + bk < k ? to_double(b[at]) : 0.0;
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
    const double dot_unit = 1.01 * 0x1p-22 * (k / 16.0 + 2.0);
    for (int i = 0; i < 4; ++i) {
      for (int j = 0; j < 4; ++j) {
        const double d = dot_unit * magnitude[i][j] + k * 0x1p-126;
        const bool rounds =
            p.nodes * p.locals > 1 && p.result.partials == kernels::Partials::kElement;
        const double e = rounds ? d + unit * (fabs(sum[i][j]) + d) + tiny : d;
        node_total[i][j] += sum[i][j];
        node_bound[i][j] += e + node_gamma * (fabs(sum[i][j]) + e);
        if ((rank + 1) % p.locals != 0) continue;
        const double magnitude_of_node = fabs(node_total[i][j]);
        double node = node_bound[i][j];
        if (rounds && p.locals > 1 && p.nodes > 1) node += unit * (magnitude_of_node + node) + tiny;
        total[i][j] += node_total[i][j];
        total_bound[i][j] += node + gamma * (magnitude_of_node + node);
        node_total[i][j] = node_bound[i][j] = 0;
      }
    }
  }
  double worst = 0, error_max = 0;
  long long bad = 0, first_bad = -1;
  const bool gated = p.result.epilogue.gated();
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 4; j += gated ? 2 : 1) {
      const int row = m0 + ty * 4 + i;
      const int column = n0 + tx * 4 + j;
      if (row >= p.m || column >= p.n) continue;
      const auto sum_at = [&](int of) -> Bounded {
        Bounded sum = {total[i][of], total_bound[i][of]};
        if (p.bias == nullptr) return sum;
        sum.exact += to_double(static_cast<const Element*>(p.bias)[n0 + tx * 4 + of]);
        sum.error += 0x1p-24 * (fabs(sum.exact) + sum.error);
        return sum;
      };
      const Bounded result =
          activated(p.result.epilogue.activation, sum_at(j), sum_at(gated ? j + 1 : j));
      const double exact = result.exact;
      const double bound = result.error + unit * (fabs(exact) + result.error) + tiny;
      const int to = gated ? column / 2 : column;
      const double error = fabs(to_double(c[static_cast<std::int64_t>(row) * ldc + to]) - exact);
      if (!(error <= bound)) {  // NaN lands here too
        ++bad;
        first_bad = static_cast<long long>(row) * p.n + to;
      }
      worst = fmax(worst, isfinite(error) ? error / bound : 1e300);
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

__global__ void differences_kernel(const std::uint16_t* x, std::int64_t ldx, const std::uint16_t* y,
                                   std::int64_t ldy, std::int64_t rows, std::int64_t length,
                                   unsigned long long* different) {
  unsigned long long mine = 0;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x;
       i < rows * length; i += step) {
    mine += x[i / length * ldx + i % length] != y[i / length * ldy + i % length];
  }
  if (mine > 0) atomicAdd(different, mine);
}

constexpr std::uint16_t kGapBits = 0xffff;  // a NaN of both types

/// Writes the gaps, or counts what is in them that was not written so.
template <bool kCounts>
__global__ void gaps_kernel(std::uint16_t* elements, std::int64_t rows, std::int64_t length,
                            std::int64_t gap, unsigned long long* touched) {
  unsigned long long mine = 0;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x;
       i < rows * gap; i += step) {
    std::uint16_t& element = elements[i / gap * (length + gap) + length + i % gap];
    if constexpr (kCounts) {
      mine += element != kGapBits;
    } else {
      element = kGapBits;
    }
  }
  if (mine > 0) atomicAdd(touched, mine);
}

__global__ void delay_kernel(std::uint64_t ns) {
  const std::uint64_t end_ns = kernels::cuda::ptx::now_ns() + ns;
  while (kernels::cuda::ptx::now_ns() < end_ns) __nanosleep(1000);
}

__device__ void add_vector(float (&sum)[8], const uint4& vector) {
  const std::uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] += __uint_as_float(words[i] << 16);
    sum[2 * i + 1] += __uint_as_float(words[i] & 0xffff0000u);
  }
}

template <int kRanks>
__global__ void __launch_bounds__(512)
    all_reduce_kernel(const AllReduceParts p, std::int64_t count) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += step) {
    uint4 loaded[kRanks];
#pragma unroll
    for (int r = 0; r < kRanks; ++r) loaded[r] = __ldcs(static_cast<const uint4*>(p.parts[r]) + i);
    float sum[8] = {};
#pragma unroll
    for (int r = 0; r < kRanks; ++r) add_vector(sum, loaded[r]);
    std::uint32_t words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(sum[2 * w], sum[2 * w + 1]);
      words[w] = *reinterpret_cast<const std::uint32_t*>(&pair);
    }
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      static_cast<uint4*>(p.outs[r])[i] = {words[0], words[1], words[2], words[3]};
    }
  }
}

/// What the kernel that `launch` launches adds to a counter; waits.
template <class Launch>
std::int64_t count_on_device(cudaStream_t stream, const Launch& launch) {
  DeviceMemory memory(sizeof(unsigned long long));
  auto* on_device = static_cast<unsigned long long*>(memory.data());
  unsigned long long found = 0;
  require(cudaMemsetAsync(on_device, 0, sizeof found, stream), "count");
  launch(on_device);
  require(cudaGetLastError(), "count");
  require(cudaMemcpyAsync(&found, on_device, sizeof found, cudaMemcpyDeviceToHost, stream),
          "count");
  require(cudaStreamSynchronize(stream), "count");
  return static_cast<std::int64_t>(found);
}

double from_bits(unsigned long long bits) {
  double value;
  static_assert(sizeof value == sizeof bits);
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace

Verdict judge_sum(const SummedProduct& product, const void* c, int ldc, cudaStream_t stream) {
  DeviceMemory memory(sizeof(DeviceVerdict));
  auto* on_device = static_cast<DeviceVerdict*>(memory.data());
  DeviceVerdict found{0, 0, 0, -1};
  require(cudaMemcpyAsync(on_device, &found, sizeof found, cudaMemcpyHostToDevice, stream),
          "judge: verdict in");
  const dim3 grid(static_cast<unsigned>((product.n + kTile - 1) / kTile),
                  static_cast<unsigned>((product.m + kTile - 1) / kTile));
  if (product.dtype == kernels::DType::kBf16) {
    judge_kernel<<<grid, 256, 0, stream>>>(product, static_cast<const __nv_bfloat16*>(c), ldc,
                                           0x1p-8, 0x1p-134, on_device);
  } else {
    judge_kernel<<<grid, 256, 0, stream>>>(product, static_cast<const __half*>(c), ldc, 0x1p-11,
                                           0x1p-25, on_device);
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

void poison_gaps(void* elements, std::int64_t rows, std::int64_t length, std::int64_t gap,
                 cudaStream_t stream) {
  if (gap == 0) return;
  gaps_kernel<false>
      <<<264, 512, 0, stream>>>(static_cast<std::uint16_t*>(elements), rows, length, gap, nullptr);
  require(cudaGetLastError(), "gaps");
}

std::int64_t count_touched_gaps(const void* elements, std::int64_t rows, std::int64_t length,
                                std::int64_t gap, cudaStream_t stream) {
  if (gap == 0) return 0;
  return count_on_device(stream, [&](unsigned long long* touched) {
    auto* const all = static_cast<std::uint16_t*>(const_cast<void*>(elements));
    gaps_kernel<true><<<264, 512, 0, stream>>>(all, rows, length, gap, touched);
  });
}

std::int64_t count_different(const void* x, const void* y, std::int64_t count,
                             cudaStream_t stream) {
  return count_different_rows(x, count, y, count, 1, count, stream);
}

std::int64_t count_different_rows(const void* x, std::int64_t ldx, const void* y, std::int64_t ldy,
                                  std::int64_t rows, std::int64_t length, cudaStream_t stream) {
  return count_on_device(stream, [&](unsigned long long* different) {
    differences_kernel<<<264, 512, 0, stream>>>(static_cast<const std::uint16_t*>(x), ldx,
                                                static_cast<const std::uint16_t*>(y), ldy, rows,
                                                length, different);
  });
}

void delay(std::uint64_t ns, cudaStream_t stream) {
  delay_kernel<<<1, 1, 0, stream>>>(ns);
  require(cudaGetLastError(), "delay");
}

void all_reduce(const AllReduceParts& parts, std::int64_t count, cudaStream_t stream) {
  constexpr int kBlocks = 132 * 4;
  const std::int64_t vectors = count / 8;
  switch (parts.ranks) {
    case 2:
      all_reduce_kernel<2><<<kBlocks, 512, 0, stream>>>(parts, vectors);
      break;
    case 4:
      all_reduce_kernel<4><<<kBlocks, 512, 0, stream>>>(parts, vectors);
      break;
    case 8:
      all_reduce_kernel<8><<<kBlocks, 512, 0, stream>>>(parts, vectors);
      break;
    default:
      require(cudaErrorInvalidValue, "all_reduce: ranks");
  }
  require(cudaGetLastError(), "all_reduce");
}

}  // namespace mk::test
