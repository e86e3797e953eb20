/// \file
/// What the workers of a warpgroup do (executor.cuh): sums and copies of rows, as their leader asks
/// for them.
#pragma once

#include <cstdint>

#include "kernels/comm/sum_job.h"
#include "kernels/cuda/core/activation.cuh"
#include "kernels/cuda/core/ptx.cuh"
#include "kernels/cuda/skeleton/launch_state.h"

namespace mk::kernels::cuda {

/// Eight elements: what one thread loads or stores at a time.
using Vector = uint4;
inline constexpr std::uint32_t kVectorElements = 8;

/// A sum (or, with one source, a copy) of rows; strides and columns in vectors.
struct VectorJob {
  const Vector* sources[kListedSources];
  BankedSources banked;  ///< SumJob's
  Vector* targets[shm::kLocalRanksMax];
  std::uint32_t source_stride;
  std::uint32_t target_stride;
  std::uint32_t source_count;     ///< 0: no more jobs
  std::uint32_t rounded_sources;  ///< SumJob's
  std::uint32_t target_count;
  std::uint32_t rows;
  std::uint32_t columns;
  // Of jobs that are not SumJob::is_plain(); targets of a gated activation are strided by half
  // vectors.
  bool finishes;  ///< false: plain
  bool f32_sources;
  bool f32_targets;
  Activation activation;
  const Vector* bias;  ///< of the first column on, or null

  __device__ const Vector* source(std::uint32_t i) const {
    if (i < kListedSources) return sources[i];
    return reinterpret_cast<const Vector*>(banked.at(i - kListedSources));
  }
};

/// A group is the leader's warp and the workers.
inline constexpr std::uint32_t kWorkers = kGroupThreads - 32;

/// Between a leader and its workers.
struct Jobs {
  static constexpr std::uint32_t kSlots = 2;
  std::uint64_t posted[kSlots];  ///< to the workers: the job is written
  std::uint64_t done[kSlots];    ///< to the leader: every worker is done with it
  VectorJob slots[kSlots];

  /// One thread, before the others' first use.
  __device__ void begin() {
    for (std::uint32_t slot = 0; slot < kSlots; ++slot) {
      ptx::mbarrier_init(&posted[slot], 1);
      ptx::mbarrier_init(&done[slot], kWorkers);
    }
  }
};

/// sum += vector, or sum = vector for the first.
template <class Element>
__device__ __forceinline__ void add(float (&sum)[8], const Vector& vector, bool first) {
  const std::uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float low, high;
    unpack_two<Element>(words[i], &low, &high);
    sum[2 * i] = first ? low : sum[2 * i] + low;
    sum[2 * i + 1] = first ? high : sum[2 * i + 1] + high;
  }
}

template <class Element>
__device__ __forceinline__ Vector rounded(const float (&sum)[8]) {
  return {pack_two<Element>(sum[0], sum[1]), pack_two<Element>(sum[2], sum[3]),
          pack_two<Element>(sum[4], sum[5]), pack_two<Element>(sum[6], sum[7])};
}

/// What a sum is when it has been stored and read again.
template <class Element>
__device__ __forceinline__ void round_in_place(float (&sum)[8]) {
  add<Element>(sum, rounded<Element>(sum), true);
}

/// Where the vectors of a job lie that one thread takes, one after the other.
class VectorWalk {
 public:
  __device__ VectorWalk(const VectorJob& job, std::uint32_t thread, std::uint32_t threads)
      : row_(thread / job.columns),
        column_(thread - row_ * job.columns),
        step_rows_(threads / job.columns),
        step_columns_(threads - step_rows_ * job.columns),
        columns_(job.columns) {}
  __device__ std::uint32_t at(std::uint32_t stride) const { return row_ * stride + column_; }
  __device__ std::uint32_t column() const { return column_; }
  __device__ void advance() {
    row_ += step_rows_;
    column_ += step_columns_;
    const bool over = column_ >= columns_;
    row_ += over ? 1 : 0;
    column_ -= over ? columns_ : 0;
  }

 private:
  std::uint32_t row_, column_;
  std::uint32_t step_rows_, step_columns_;
  std::uint32_t columns_;
};

/// A batch of vectors of one thread. (Those that are not there are the first one again: loads under
/// a condition would wait for each other.)
template <int kSize>
struct VectorBatch {
  std::uint32_t from[kSize];
  std::uint32_t to[kSize];

  /// The next kSize, of which `there` are there.
  __device__ VectorBatch(const VectorJob& job, VectorWalk& walk, int there) {
    const std::uint32_t first = walk.at(job.source_stride);
#pragma unroll
    for (int b = 0; b < kSize; ++b) {
      from[b] = b < there ? walk.at(job.source_stride) : first;
      to[b] = walk.at(job.target_stride);
      walk.advance();
    }
  }
  static __device__ void store(const VectorJob& job, std::uint32_t to, const Vector& result) {
#pragma unroll 1
    for (std::uint32_t t = 0; t < job.target_count; ++t) __stcg(job.targets[t] + to, result);
  }
};

/// The sums of the next kBatch vectors, of which `there` are there: all loads are on their way
/// before the first is used. Loads and stores go past L1: others on this GPU and its peers write
/// and read the same lines. What is summed nobody reads again. `kRounded`: the job's
/// rounded_sources.
template <class Element, int kSources, int kBatch, int kRounded>
__device__ __forceinline__ void sum_vectors(const VectorJob& job, VectorWalk& walk, int there) {
  const VectorBatch<kBatch> batch(job, walk, there);
  Vector loaded[kBatch][kSources];
#pragma unroll
  for (int b = 0; b < kBatch; ++b) {
#pragma unroll
    for (int s = 0; s < kSources; ++s)
      loaded[b][s] = ptx::load_last(job.sources[s] + batch.from[b]);
  }
#pragma unroll
  for (int b = 0; b < kBatch; ++b) {
    Vector result = loaded[b][0];
    if constexpr (kSources > 1) {
      float sum[8];
#pragma unroll
      for (int s = 0; s < kSources; ++s) {
        add<Element>(sum, loaded[b][s], s == 0);
        if (s + 1 == kRounded) round_in_place<Element>(sum);
      }
      result = rounded<Element>(sum);
    }
    if (b < there) batch.store(job, batch.to[b], result);
  }
}

/// The same of any number of sources: the loads of one source are on their way together.
template <class Element, int kBatch>
__device__ __forceinline__ void sum_vectors_of_any(const VectorJob& job, VectorWalk& walk,
                                                   int there) {
  const VectorBatch<kBatch> batch(job, walk, there);
  float sums[kBatch][8];
#pragma unroll 1
  for (std::uint32_t s = 0; s < job.source_count; ++s) {
    const Vector* const source = job.source(s);
    Vector loaded[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) loaded[b] = ptx::load_last(source + batch.from[b]);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) add<Element>(sums[b], loaded[b], s == 0);
    if (s + 1 != job.rounded_sources) continue;
#pragma unroll
    for (int b = 0; b < kBatch; ++b) round_in_place<Element>(sums[b]);
  }
#pragma unroll
  for (int b = 0; b < kBatch; ++b)
    if (b < there) batch.store(job, batch.to[b], rounded<Element>(sums[b]));
}

/// This thread's share of a job with kSources sources, kRounded of them rounded; 0: with any
/// number.
template <class Element, int kSources, int kBatch, int kRounded = 0>
__device__ __forceinline__ void run_job(const VectorJob& job, std::uint32_t thread,
                                        std::uint32_t threads) {
  const auto sum = [&job](VectorWalk& walk, int there) {
    if constexpr (kSources == 0) {
      sum_vectors_of_any<Element, kBatch>(job, walk, there);
    } else {
      sum_vectors<Element, kSources, kBatch, kRounded>(job, walk, there);
    }
  };
  const std::uint32_t total = job.rows * job.columns;
  if (thread >= total) return;
  auto left = static_cast<int>((total - thread + threads - 1) / threads);
  VectorWalk walk(job, thread, threads);
#pragma unroll 1
  for (; left >= kBatch; left -= kBatch) sum(walk, kBatch);
  if (left > 0) sum(walk, left);
}

/// Vectors that a thread has on their way at a time, at most: as many as its registers hold.
inline constexpr int kLoadsMax = 32;
constexpr int batch_of(int sources, int loads) {
  if (sources == 4 && loads == kLoadsMax) return 6;
  return loads / sources < 8 ? loads / sources : 8;
}
/// A thread loads so many vectors of each source at a time.
template <int kSources, int kLoads>
inline constexpr int kBatchOf = batch_of(kSources, kLoads);

/// This thread's share of a job.
template <class Element, int kLoads>
__device__ __forceinline__ void run_plain_job(const VectorJob& job, std::uint32_t thread,
                                              std::uint32_t threads) {
  switch (job.source_count) {
    case 1:
      return run_job<Element, 1, kBatchOf<1, kLoads>>(job, thread, threads);
    case 2:
      return run_job<Element, 2, kBatchOf<2, kLoads>>(job, thread, threads);
    case 3:
      return run_job<Element, 3, kBatchOf<3, kLoads>>(job, thread, threads);
    case 4:
      return run_job<Element, 4, kBatchOf<4, kLoads>>(job, thread, threads);
    case 5:
      return run_job<Element, 5, kBatchOf<5, kLoads>>(job, thread, threads);
    case 6:
      return run_job<Element, 6, kBatchOf<6, kLoads>>(job, thread, threads);
    case 7:
      return run_job<Element, 7, kBatchOf<7, kLoads>>(job, thread, threads);
    case 8:
      return run_job<Element, 8, kBatchOf<8, kLoads>>(job, thread, threads);
    default:
      return run_job<Element, 0, 4>(job, thread, threads);
  }
}
/// The same of one that has rounded_sources: those of two, four or eight local ranks and of one
/// other node, or any.
template <class Element, int kLoads>
__device__ __forceinline__ void run_rounding_job(const VectorJob& job, std::uint32_t thread,
                                                 std::uint32_t threads) {
  switch (job.source_count == job.rounded_sources + 1 ? job.rounded_sources : 0) {
    case 2:
      return run_job<Element, 3, kBatchOf<3, kLoads>, 2>(job, thread, threads);
    case 4:
      return run_job<Element, 5, kBatchOf<5, kLoads>, 4>(job, thread, threads);
    case 8:
      return run_job<Element, 9, kBatchOf<9, kLoads>, 8>(job, thread, threads);
    default:
      return run_job<Element, 0, 4>(job, thread, threads);
  }
}

/// What of a vector of sums is stored: C's, which are half as many of gates and ups.
template <class Element>
__device__ __forceinline__ void finish_vector(const VectorJob& job, float (&sum)[8],
                                              std::uint32_t column, std::uint32_t to) {
  if (job.bias != nullptr) add<Element>(sum, __ldg(job.bias + column), false);
  switch (job.activation) {
    case Activation::kNone:
      break;
    case Activation::kRelu:
#pragma unroll
      for (float& s : sum) s = relu(s);
      break;
    case Activation::kGelu:
#pragma unroll
      for (float& s : sum) s = gelu(s);
      break;
    case Activation::kSilu:
#pragma unroll
      for (float& s : sum) s = silu(s);
      break;
    case Activation::kGatedSilu: {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i] = silu(sum[2 * i]) * sum[2 * i + 1];
      const uint2 half = {pack_two<Element>(sum[0], sum[1]), pack_two<Element>(sum[2], sum[3])};
#pragma unroll 1
      for (std::uint32_t t = 0; t < job.target_count; ++t)
        __stcg(reinterpret_cast<uint2*>(job.targets[t]) + to, half);
      return;
    }
  }
  VectorBatch<1>::store(job, to, rounded<Element>(sum));
}

/// sum += the four fp32 numbers of the vector, or sum = those for the first.
__device__ __forceinline__ void add_f32(float* sum, const Vector& vector, bool first) {
  const std::uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    sum[i] = first ? __uint_as_float(words[i]) : sum[i] + __uint_as_float(words[i]);
}
__device__ __forceinline__ Vector as_vector(const float* four) {
  return {__float_as_uint(four[0]), __float_as_uint(four[1]), __float_as_uint(four[2]),
          __float_as_uint(four[3])};
}

/// This thread's share of a job that is more than elements added and rounded: partial sums in fp32,
/// bias, activation. Most launches have none.
template <class Element>
__device__ __forceinline__ void run_finishing_job(const VectorJob& job, std::uint32_t thread,
                                                  std::uint32_t threads) {
  constexpr int kBatch = 4;
  const std::uint32_t total = job.rows * job.columns;
  if (thread >= total) return;
  auto left = static_cast<int>((total - thread + threads - 1) / threads);
  VectorWalk walk(job, thread, threads);
#pragma unroll 1
  for (; left > 0; left -= kBatch) {
    const VectorWalk begin = walk;
    const VectorBatch<kBatch> batch(job, walk, left);
    float sums[kBatch][8];
#pragma unroll 1
    for (std::uint32_t s = 0; s < job.source_count; ++s) {
      const Vector* const source = job.source(s);
      if (job.f32_sources) {
        Vector loaded[kBatch][2];
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          loaded[b][0] = ptx::load_last(source + 2 * batch.from[b]);
          loaded[b][1] = ptx::load_last(source + 2 * batch.from[b] + 1);
        }
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
#pragma unroll
          for (int half = 0; half < 2; ++half) add_f32(sums[b] + 4 * half, loaded[b][half], s == 0);
        }
      } else {
        Vector loaded[kBatch];
#pragma unroll
        for (int b = 0; b < kBatch; ++b) loaded[b] = ptx::load_last(source + batch.from[b]);
#pragma unroll
        for (int b = 0; b < kBatch; ++b) add<Element>(sums[b], loaded[b], s == 0);
      }
      if (s + 1 != job.rounded_sources) continue;
#pragma unroll
      for (int b = 0; b < kBatch; ++b) round_in_place<Element>(sums[b]);
    }
    VectorWalk at = begin;
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (b >= left) break;
      if (job.f32_targets) {
#pragma unroll 1
        for (std::uint32_t t = 0; t < job.target_count; ++t) {
          __stcg(job.targets[t] + 2 * batch.to[b], as_vector(sums[b]));
          __stcg(job.targets[t] + 2 * batch.to[b] + 1, as_vector(sums[b] + 4));
        }
      } else {
        finish_vector<Element>(job, sums[b], at.column(), batch.to[b]);
      }
      at.advance();
    }
  }
}

/// A worker thread's life in a role: jobs until the leader says there are no more. It waits without
/// a deadline of its own, for a leader all of whose waits have one. `kRounds`: whether the operator
/// has jobs with rounded_sources; `kLoads`: see kLoadsMax.
template <class Element, bool kRounds, int kLoads = kLoadsMax>
__device__ __forceinline__ void work(Jobs& jobs, std::uint32_t thread, std::uint32_t threads) {
  for (std::uint32_t number = 0;; ++number) {
    const std::uint32_t slot = number % Jobs::kSlots;
    while (!ptx::mbarrier_try_wait(&jobs.posted[slot], number / Jobs::kSlots % 2)) {
    }
    const VectorJob& job = jobs.slots[slot];
    if (job.source_count == 0) return;
    if (job.finishes) {
      run_finishing_job<Element>(job, thread, threads);
    } else if (kRounds && job.rounded_sources != 0) {
      run_rounding_job<Element, kLoads>(job, thread, threads);
    } else {
      run_plain_job<Element, kLoads>(job, thread, threads);
    }
    // Each for itself: a lane that arrives for its warp costs no less, and racecheck does not see
    // that it does.
    ptx::mbarrier_arrive(&jobs.done[slot]);
  }
}

}  // namespace mk::kernels::cuda
