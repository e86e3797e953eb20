/// \file
/// The CUDA executor of the shared roles (gemm_ar/roles.h and the others'). Each warpgroup is a
/// block in their sense, so that one's waits overlap another's sums: its first thread, the
/// **leader**, runs the role as it stands in roles.h, with its waits and flags; its other three
/// warps are **workers** and do the sums and copies the leader asks for. Up to two jobs are in
/// flight, so that the leader looks for the next tile while the workers add up this one. The
/// leader's own warp looks at its flags, many at a time (leader_warp.cuh).
#pragma once

#include <cstdint>

#include "kernels/comm/sum_job.h"
#include "kernels/comm/tile_grid.h"
#include "kernels/cuda/bulk_copier.cuh"
#include "kernels/cuda/executor_common.cuh"
#include "kernels/cuda/gemm_core.cuh"
#include "kernels/cuda/launch_state.h"
#include "kernels/cuda/leader_warp.cuh"

namespace mk::kernels::cuda {

/// Eight elements: what one thread loads or stores at a time.
using Vector = uint4;
inline constexpr std::uint32_t kVectorElements = 8;

/// A sum (or, with one source, a copy) of rows; strides and columns in vectors.
struct VectorJob {
  const Vector* sources[shm::kLocalRanksMax];
  Vector* targets[shm::kLocalRanksMax];
  std::uint32_t source_stride;
  std::uint32_t target_stride;
  std::uint32_t source_count;     ///< 0: no more jobs
  std::uint32_t rounded_sources;  ///< SumJob's
  std::uint32_t target_count;
  std::uint32_t rows;
  std::uint32_t columns;
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
    Vector loaded[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) loaded[b] = ptx::load_last(job.sources[s] + batch.from[b]);
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

/// This thread's share of a job.
template <class Element>
__device__ __forceinline__ void run_plain_job(const VectorJob& job, std::uint32_t thread,
                                              std::uint32_t threads) {
  switch (job.source_count) {
    case 1:
      return run_job<Element, 1, 8>(job, thread, threads);
    case 2:
      return run_job<Element, 2, 8>(job, thread, threads);
    case 3:
      return run_job<Element, 3, 8>(job, thread, threads);
    case 4:
      return run_job<Element, 4, 6>(job, thread, threads);
    case 5:
      return run_job<Element, 5, 6>(job, thread, threads);
    case 6:
      return run_job<Element, 6, 5>(job, thread, threads);
    case 7:
      return run_job<Element, 7, 4>(job, thread, threads);
    case 8:
      return run_job<Element, 8, 4>(job, thread, threads);
    default:
      return run_job<Element, 0, 4>(job, thread, threads);
  }
}
/// The same of one that has rounded_sources: those of two, four or eight local ranks and of one
/// other node, or any.
template <class Element>
__device__ __forceinline__ void run_rounding_job(const VectorJob& job, std::uint32_t thread,
                                                 std::uint32_t threads) {
  switch (job.source_count == job.rounded_sources + 1 ? job.rounded_sources : 0) {
    case 2:
      return run_job<Element, 3, 8, 2>(job, thread, threads);
    case 4:
      return run_job<Element, 5, 6, 4>(job, thread, threads);
    case 8:
      return run_job<Element, 9, 3, 8>(job, thread, threads);
    default:
      return run_job<Element, 0, 4>(job, thread, threads);
  }
}

/// A worker thread's life in a role: jobs until the leader says there are no more. It waits without
/// a deadline of its own, for a leader all of whose waits have one. `kRounds`: whether the operator
/// has jobs with rounded_sources.
template <class Element, bool kRounds>
__device__ __forceinline__ void work(Jobs& jobs, std::uint32_t thread, std::uint32_t threads) {
  for (std::uint32_t number = 0;; ++number) {
    const std::uint32_t slot = number % Jobs::kSlots;
    while (!ptx::mbarrier_try_wait(&jobs.posted[slot], number / Jobs::kSlots % 2)) {
    }
    const VectorJob& job = jobs.slots[slot];
    if (job.source_count == 0) return;
    if (kRounds && job.rounded_sources != 0) {
      run_rounding_job<Element>(job, thread, threads);
    } else {
      run_plain_job<Element>(job, thread, threads);
    }
    // Each for itself: a lane that arrives for its warp costs no less, and racecheck does not see
    // that it does.
    ptx::mbarrier_arrive(&jobs.done[slot]);
  }
}

/// What all leaders are.
class LeaderBase : public RoleExecutor {
 public:
  __device__ LeaderBase(LeaderWarp& warp, DeviceState& state) : RoleExecutor(state), warp_(warp) {}

  template <class Flag>
  __device__ std::uint32_t first_missing(std::uint32_t begin, std::uint32_t end,
                                         std::uint32_t wanted, Flag&& flag) {
    return warp_.first_missing(begin, end, wanted, flag);
  }
  __device__ std::uint32_t first_seen() const { return warp_.first_seen(); }

 protected:
  __device__ void end_warp() { warp_.end(); }

 private:
  LeaderWarp& warp_;
};

/// The leader of an operator that only copies within a node: the copy engine does it, there are no
/// workers.
class CopyLeader : public LeaderBase {
 public:
  using Shared = BulkCopierShared;
  static constexpr bool kHasWorkers = false;

  __device__ CopyLeader(LeaderWarp& warp, DeviceState& state, Shared& shared, void* /*c*/,
                        std::uint64_t /*ldc*/)
      : LeaderBase(warp, state), copier_(shared) {}

  __device__ void copy(const CopyJob& job) { copier_.copy(job); }
  __device__ void stores_done() { copier_.finish(); }
  __device__ void loads_begin() { ptx::fence_acquired_to_async(); }
  /// See gather::start_dma. What the engines do then: ops/ag_gemm/sm90.cc.
  __device__ void start_dma(std::uint32_t epoch, std::uint32_t chunks) {
    const uint4 epochs = {epoch, epoch, epoch, epoch};
    for (std::uint32_t i = 0; i < chunks; i += 4)
      *reinterpret_cast<uint4*>(&state().dma_flags[i]) = epochs;
    shm::store_relaxed(&state().dma_started, epoch);
    shm::store_release(&state().dma_go, 1u);
  }
  /// See gather::pass_on_by_dma. (By one group.)
  __device__ void pass_on_dma() {
    shm::store_release(&state().dma_pieces, shm::load_relaxed(&state().dma_pieces) + 1);
  }
  __device__ const std::uint32_t* dma_passed_on() { return &state().dma_passed_on; }
  __device__ void dma_done() {
    shm::store_relaxed(&state().dma_pieces, 0u);
    shm::store_relaxed(&state().dma_passed_on, 0u);
  }
  /// After the last job; the warp's other lanes return.
  __device__ void finish() {
    copier_.end();
    end_warp();
  }

 protected:
  __device__ BulkCopier& copier() { return copier_; }

 private:
  BulkCopier copier_;
};

/// What roles.h asks of an executor, on the leader. Workers' loads and stores are ordered by the
/// barriers in shared memory, before the leader's release and after its acquire.
class Leader : public LeaderBase {
 public:
  using Shared = Jobs;
  static constexpr bool kHasWorkers = true;

  /// `c`: the caller's result, rows `ldc` apart; may be null where nobody asks for it.
  __device__ Leader(LeaderWarp& warp, DeviceState& state, Jobs& jobs, void* c, std::uint64_t ldc)
      : LeaderBase(warp, state), jobs_(jobs), c_(static_cast<std::uint16_t*>(c)), ldc_(ldc) {}

  __device__ void sum(const SumJob& job) {
    VectorJob& to = next_job();
    for (std::uint32_t s = 0; s < job.source_count; ++s)
      to.sources[s] = static_cast<const Vector*>(job.sources[s]);
    for (std::uint32_t t = 0; t < job.target_count; ++t)
      to.targets[t] = static_cast<Vector*>(job.targets[t]);
    to.source_count = job.source_count;
    to.rounded_sources = job.rounded_sources;
    to.target_count = job.target_count;
    post(to, job.rows, job.columns / kVectorElements, job.source_stride / kVectorElements,
         job.target_stride / kVectorElements);
  }
  __device__ bool wants_c() const { return c_ != nullptr; }
  __device__ void copy_to_c(const TileRect& rect, const void* source, std::uint64_t source_stride) {
    VectorJob& to = next_job();
    to.sources[0] = static_cast<const Vector*>(source);
    to.targets[0] = static_cast<Vector*>(c_at(rect));
    to.source_count = 1;
    to.rounded_sources = 0;
    to.target_count = 1;
    post(to, rect.rows, rect.columns / kVectorElements, source_stride / kVectorElements,
         ldc_ / kVectorElements);
  }
  __device__ void* c_at(const TileRect& rect) const { return c_ + rect.row * ldc_ + rect.column; }
  __device__ std::uint64_t c_stride() const { return ldc_; }
  /// Waits for all jobs posted.
  __device__ void stores_done() {
    const std::uint32_t in_flight = posted_ < Jobs::kSlots ? posted_ : Jobs::kSlots;
    for (std::uint32_t back = in_flight; back > 0; --back) await_done(posted_ - back);
  }
  __device__ void loads_begin() {}
  /// After the last job; the workers and the warp's other lanes return.
  __device__ void finish() {
    stores_done();
    VectorJob& to = next_job();
    to.source_count = 0;
    ptx::mbarrier_arrive(&jobs_.posted[posted_ % Jobs::kSlots]);
    end_warp();
  }

 private:
  __device__ VectorJob& next_job() {
    if (posted_ >= Jobs::kSlots) await_done(posted_ - Jobs::kSlots);
    return jobs_.slots[posted_ % Jobs::kSlots];
  }
  /// Columns and strides in vectors.
  __device__ void post(VectorJob& job, std::uint32_t rows, std::uint32_t columns,
                       std::uint64_t source_stride, std::uint64_t target_stride) {
    job.rows = rows;
    job.columns = columns;
    job.source_stride = static_cast<std::uint32_t>(source_stride);
    job.target_stride = static_cast<std::uint32_t>(target_stride);
    ptx::mbarrier_arrive(&jobs_.posted[posted_ % Jobs::kSlots]);
    ++posted_;
  }
  __device__ void await_done(std::uint32_t number) {
    ptx::mbarrier_wait(&jobs_.done[number % Jobs::kSlots], number / Jobs::kSlots % 2);
  }

  Jobs& jobs_;
  std::uint16_t* c_;
  std::uint64_t ldc_;
  std::uint32_t posted_ = 0;
};

}  // namespace mk::kernels::cuda
