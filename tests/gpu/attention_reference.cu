#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>

#include "tests/gpu/attention_reference.h"

namespace mk::test {

using kernels::cuda::AttentionProblem;
using kernels::cuda::AttentionTensor;
using kernels::cuda::DType;

namespace {

constexpr int kThreads = 128;

struct Counts {
  double worst[2];
  double error_max[2];
  unsigned long long bad[2];
  unsigned long long first_bad[2];
};

__device__ double to_double(__nv_bfloat16 x) { return static_cast<double>(__bfloat162float(x)); }
__device__ double to_double(__half x) { return static_cast<double>(__half2float(x)); }

template <class Element>
__device__ const Element* row_of(const AttentionTensor& tensor, int batch, int row, int head) {
  return static_cast<const Element*>(tensor.data) + batch * tensor.batch_stride +
         row * tensor.row_stride + head * tensor.head_stride;
}

/// Over the block; every thread gets the answer.
template <class Combine>
__device__ double over_block(double value, const Combine& combine) {
  __shared__ double parts[kThreads];
  __syncthreads();
  parts[threadIdx.x] = value;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half)
      parts[threadIdx.x] = combine(parts[threadIdx.x], parts[threadIdx.x + half]);
    __syncthreads();
  }
  return parts[0];
}

__device__ void atomic_max(double* to, double value) {
  // Not negative, so they order like their bits. Most are no news: a look is cheaper.
  if (value <= *static_cast<volatile double*>(to)) return;
  atomicMax(reinterpret_cast<unsigned long long*>(to), __double_as_longlong(value));
}

__device__ void count(Counts* counts, int which, double got, double expected, double bound,
                      unsigned long long index) {
  bool bad;
  if (isfinite(expected)) {
    const double error = fabs(got - expected);
    bad = !(error <= bound);
    atomic_max(&counts->worst[which], bad && !isfinite(error) ? INFINITY : error / bound);
    atomic_max(&counts->error_max[which], isfinite(error) ? error : INFINITY);
  } else {
    bad = isnan(expected) ? !isnan(got) : got != expected;
  }
  if (bad) {
    atomicAdd(&counts->bad[which], 1ull);
    atomicMin(&counts->first_bad[which], index);
  }
}

/// One block for each query of a head: threads share the keys, then the elements.
template <class Element>
__global__ void judge_kernel(AttentionProblem problem, double scale, int tile_keys, int runs,
                             int row_begin, Counts* counts) {
  constexpr bool kBf16 = std::is_same_v<Element, __nv_bfloat16>;
  const double u = kBf16 ? 0x1p-8 : 0x1p-11;
  const int row = row_begin + blockIdx.x;
  const int head = blockIdx.y;
  const int batch = blockIdx.z;
  const int dim = problem.head_dim;
  const int key_head = head / (problem.query_heads / problem.key_heads);
  int keys = problem.keys;
  if (problem.causal) keys = max(0, min(keys, row + 1 + problem.keys - problem.queries));
  const auto most = [](double a, double b) { return a > b || isnan(a) ? a : b; };
  const auto sum = [](double a, double b) { return a + b; };

  __shared__ double query[128];
  if (threadIdx.x < dim) {
    query[threadIdx.x] = to_double(row_of<Element>(problem.q, batch, row, head)[threadIdx.x]);
  }
  __syncthreads();
  const double score_unit = scale * 1.01 * 0x1p-22 * (dim / 16 + 2);
  const auto score = [&](int key, double* error) {
    const Element* k = row_of<Element>(problem.k, batch, key, key_head);
    double t = 0, magnitudes = 0;
    for (int i = 0; i < dim; ++i) {
      const double product = query[i] * to_double(k[i]);
      t += product;
      magnitudes += fabs(product);
    }
    *error = score_unit * magnitudes;
    return scale * t;
  };

  double my_top = -INFINITY, my_error = 0;
  for (int key = threadIdx.x; key < keys; key += kThreads) {
    double error;
    my_top = most(score(key, &error), my_top);
    my_error = most(error, my_error);
  }
  const double top = over_block(my_top, most);
  const double error_max = over_block(my_error, most);
  const double tiles = (problem.keys + tile_keys - 1) / tile_keys + runs;

  // Weights relative to the largest, of kThreads keys at one time; thread c has element c of V.
  __shared__ double weight[kThreads], weight_error[kThreads];
  double my_sum = 0, my_sum_error = 0;
  double o = 0, magnitudes = 0, errors = 0, values = 0;
  for (int first = 0; first < keys; first += kThreads) {
    const int key = first + threadIdx.x;
    double w = 0, e = 0;
    if (key < keys) {
      double error;
      const double t = score(key, &error);
      w = exp(t - top);
      e = w * expm1(error + error_max + 0x1p-22 * (top - t) + (tiles + 2) * 0x1p-20);
    }
    __syncthreads();
    weight[threadIdx.x] = w;
    weight_error[threadIdx.x] = e;
    my_sum += w;
    my_sum_error += e;
    __syncthreads();
    if (threadIdx.x < dim) {
      for (int i = 0; i < min(kThreads, keys - first); ++i) {
        const double value =
            to_double(row_of<Element>(problem.v, batch, first + i, key_head)[threadIdx.x]);
        o += weight[i] * value;
        magnitudes += weight[i] * fabs(value);
        errors += weight_error[i] * fabs(value);
        values += fabs(value);
      }
    }
  }
  const double total = over_block(my_sum, sum);
  const double total_error = keys > 0 ? over_block(my_sum_error, sum) / total : 0;
  const double sum_error = (tile_keys / 4 + tiles + 4) * 0x1p-23;
  const unsigned long long index =
      (static_cast<unsigned long long>(batch) * problem.query_heads + head) * problem.queries + row;

  if (threadIdx.x < dim) {
    const double got = to_double(row_of<Element>(problem.o, batch, row, head)[threadIdx.x]);
    double expected = 0, bound = 0;
    if (keys > 0) {
      expected = o / total;
      const double g = sum_error + 1.01 * 0x1p-22 * (keys / 16 + 2 + tiles);
      bound = errors / total + (u + g) * magnitudes / total + fabs(expected) * (total_error + g);
      if (!kBf16) bound += 0x1p-25 * values / total;
      bound *= 1.05;
      bound += u * (fabs(expected) + bound) + (kBf16 ? 0x1p-133 : 0x1p-24);
    }
    count(counts, 0, got, expected, bound, index * dim + threadIdx.x);
  }
  if (problem.lse != nullptr && threadIdx.x == 0) {
    const double got = static_cast<double>(
        problem.lse[batch * problem.lse_batch_stride + row * problem.lse_row_stride +
                    head * problem.lse_head_stride]);
    const double expected = keys > 0 ? top + log(total) : -INFINITY;
    const double bound = 1.05 * (-log1p(-fmin(0.5, total_error + sum_error)) + error_max +
                                 0x1p-22 * fabs(top) + 0x1p-22 * (fabs(expected) + 1));
    count(counts, 1, got, expected, bound, index);
  }
}

}  // namespace

AttentionVerdict judge_attention(const AttentionProblem& problem, int tile_keys, int row_begin,
                                 int row_end, cudaStream_t stream, int runs) {
  Counts host{{0, 0}, {0, 0}, {0, 0}, {~0ull, ~0ull}};
  const DeviceMemory memory(sizeof(Counts));
  auto* counts = static_cast<Counts*>(memory.data());
  require(cudaMemcpyAsync(counts, &host, sizeof(host), cudaMemcpyHostToDevice, stream), "counts");
  const double scale =
      problem.scale != 0
          ? static_cast<double>(problem.scale)
          : static_cast<double>(1.0f / std::sqrt(static_cast<float>(problem.head_dim)));
  const dim3 grid(static_cast<unsigned>(row_end - row_begin),
                  static_cast<unsigned>(problem.query_heads), static_cast<unsigned>(problem.batch));
  const auto kernel =
      problem.dtype == DType::kBf16 ? judge_kernel<__nv_bfloat16> : judge_kernel<__half>;
  kernel<<<grid, kThreads, 0, stream>>>(problem, scale, tile_keys, runs, row_begin, counts);
  require(cudaGetLastError(), "judge_attention");
  require(cudaMemcpyAsync(&host, counts, sizeof(host), cudaMemcpyDeviceToHost, stream), "counts");
  require(cudaStreamSynchronize(stream), "judge_attention");
  AttentionVerdict verdict;
  for (int which = 0; which < 2; ++which) {
    Verdict& part = which == 0 ? verdict.o : verdict.lse;
    part.worst = host.worst[which];
    part.error_max = host.error_max[which];
    part.bad = static_cast<std::int64_t>(host.bad[which]);
    part.first_bad = host.bad[which] > 0 ? static_cast<std::int64_t>(host.first_bad[which]) : -1;
  }
  return verdict;
}

}  // namespace mk::test
