/// \file
/// The CUDA executor of the shared roles (gemm_ar/roles.h and the others'). Each warpgroup is a
/// block in their sense, so that one's waits overlap another's sums. Its first thread, the
/// **leader**, runs the role as it stands in roles.h, with its waits and flags. Its other three
/// warps are **workers** and do the sums and copies the leader asks for. Up to two jobs are in
/// flight, so that the leader looks for the next tile while the workers add up this one. The
/// leader's own warp looks at its flags, many at a time (leader_warp.cuh).
#pragma once

#include <cstdint>

#include "kernels/comm/sum_job.h"
#include "kernels/comm/tile_grid.h"
#include "kernels/cuda/core/gemm_core.cuh"
#include "kernels/cuda/skeleton/executor_common.cuh"
#include "kernels/cuda/skeleton/launch_state.h"
#include "kernels/cuda/skeleton/leader_warp.cuh"
#include "kernels/cuda/transport/bulk_copier.cuh"
#include "kernels/cuda/transport/worker_sums.cuh"

namespace mk::kernels::cuda {

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
    for (std::uint32_t s = 0; s < job.source_count && s < kListedSources; ++s)
      to.sources[s] = static_cast<const Vector*>(job.sources[s]);
    if (job.source_count > kListedSources) to.banked = job.banked;
    for (std::uint32_t t = 0; t < job.target_count; ++t)
      to.targets[t] = static_cast<Vector*>(job.targets[t]);
    to.source_count = job.source_count;
    to.rounded_sources = job.rounded_sources;
    to.target_count = job.target_count;
    to.finishes = !job.is_plain();
    to.f32_sources = job.source_type == Partials::kF32;
    to.f32_targets = job.target_type == Partials::kF32;
    to.activation = job.activation;
    to.bias = reinterpret_cast<const Vector*>(job.bias);
    const bool gated = job.activation == Activation::kGatedSilu;
    post(to, job.rows, job.columns / kVectorElements, job.source_stride / kVectorElements,
         job.target_stride / (gated ? kVectorElements / 2 : kVectorElements));
  }
  __device__ bool wants_c() const { return c_ != nullptr; }
  __device__ void copy_to_c(const TileRect& rect, const void* source, std::uint64_t source_stride) {
    VectorJob& to = next_job();
    to.sources[0] = static_cast<const Vector*>(source);
    to.targets[0] = static_cast<Vector*>(c_at(rect));
    to.source_count = 1;
    to.rounded_sources = 0;
    to.target_count = 1;
    to.finishes = false;
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
