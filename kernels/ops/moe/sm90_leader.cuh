/// \file
/// The executor of MoE Dispatch+GEMM's roles outside the compute blocks is a group. Its leader
/// has tokens copied by the copy engine. Its other three warps, the workers, are the lanes of the
/// routing plan and copy what the engine cannot: rows that do not begin and end at multiples of 16
/// bytes. Those of a routing table, which are short.
#pragma once

#include <cstdint>

#include "kernels/cuda/skeleton/executor.cuh"
#include "kernels/ops/moe/routing_plan.h"

namespace mk::kernels::cuda {

/// One piece of work, from a leader to its workers.
struct MoeWork {
  enum class Kind : std::uint32_t { kCount, kArrange, kFill, kCopy, kEnd };

  std::uint64_t posted;  ///< to the workers: it is written
  std::uint64_t done;    ///< to the leader: every worker is done with it
  Kind kind;
  std::uint32_t number;  ///< the part; kArrange: the capacity
  const RoutingPlan* plan;
  RoutingTable table;
};

/// The workers of a group as lanes of the routing plan.
struct MoeLanes {
  std::uint32_t index;
  std::uint32_t* scratch;  ///< of all workers of the group
  static constexpr std::uint32_t count = kWorkers;
  static constexpr std::uint32_t scratch_words = sizeof(BulkCopierShared::buffers) / 4;

  /// Barrier 0 is the block's.
  __device__ void sync() const {
    const std::uint32_t barrier = 1 + threadIdx.x / kGroupThreads;
    // Not the aligned one: lanes of a warp may come by different ways.
    asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "n"(kWorkers) : "memory");
  }
  static __device__ void least(std::uint32_t* word, std::uint32_t value) { atomicMin(word, value); }
};

/// Shared memory of such a group.
struct MoeGroupShared {
  BulkCopierShared copier;
  MoeWork work;
  CopyJob copy;

  /// One thread, before the others' first use.
  __device__ void begin() {
    ptx::mbarrier_init(&work.posted, 1);
    ptx::mbarrier_init(&work.done, kWorkers);
  }
};

/// Words of 4 bytes, by all workers.
__device__ __forceinline__ void copy_words(const CopyJob& job, std::uint32_t thread) {
  const std::uint32_t words = job.row_bytes / 4;
  const std::uint32_t total = job.rows * words;
  for (std::uint32_t i = thread; i < total; i += kWorkers) {
    const std::uint32_t row = i / words;
    const std::uint64_t at = (i - row * words) * std::uint64_t{4};
    const std::uint32_t word =
        *reinterpret_cast<const std::uint32_t*>(job.source + row * job.source_stride + at);
    for (std::uint32_t t = 0; t < job.target_count; ++t)
      *reinterpret_cast<std::uint32_t*>(job.targets[t] + row * job.target_stride + at) = word;
  }
}

/// A worker's life in a role; see executor.cuh.
template <class Element, bool kRounds>
__device__ __forceinline__ void work(MoeGroupShared& shared, std::uint32_t thread,
                                     std::uint32_t /*threads*/) {
  MoeWork& work = shared.work;
  // Nothing is copied while there is a plan to make.
  const MoeLanes lanes{thread, reinterpret_cast<std::uint32_t*>(shared.copier.buffers)};
  for (std::uint32_t turn = 0;; ++turn) {
    while (!ptx::mbarrier_try_wait(&work.posted, turn % 2)) {
    }
    switch (work.kind) {
      case MoeWork::Kind::kCount:
        work.plan->count(work.number, work.table, lanes);
        ptx::fence_shared_to_async();  // the scratch is the copy engine's again
        break;
      case MoeWork::Kind::kArrange:
        work.plan->arrange(work.number, lanes);
        ptx::fence_shared_to_async();
        break;
      case MoeWork::Kind::kFill:
        work.plan->fill(work.number, work.table, lanes);
        ptx::fence_shared_to_async();
        break;
      case MoeWork::Kind::kCopy:
        copy_words(shared.copy, thread);
        break;
      case MoeWork::Kind::kEnd:
        return;
    }
    ptx::mbarrier_arrive(&work.done);
  }
}

class MoeLeader : public CopyLeader {
 public:
  using Shared = MoeGroupShared;
  static constexpr bool kHasWorkers = true;

  __device__ MoeLeader(LeaderWarp& warp, DeviceState& state, Shared& shared, void* c,
                       std::uint64_t ldc)
      : CopyLeader(warp, state, shared.copier, c, ldc), shared_(shared) {}

  __device__ void copy(const CopyJob& job) {
    if (suits_engine(job)) return CopyLeader::copy(job);
    shared_.copy = job;
    do_work(MoeWork::Kind::kCopy);
  }
  __device__ void count(const RoutingPlan& plan, std::uint32_t part, const RoutingTable& table) {
    set(plan, part);
    shared_.work.table = table;
    do_work(MoeWork::Kind::kCount);
  }
  __device__ void arrange(const RoutingPlan& plan, std::uint32_t capacity) {
    set(plan, capacity);
    do_work(MoeWork::Kind::kArrange);
  }
  __device__ void fill(const RoutingPlan& plan, std::uint32_t part, const RoutingTable& table) {
    set(plan, part);
    shared_.work.table = table;
    do_work(MoeWork::Kind::kFill);
  }
  /// As many as give all compute blocks row tiles in the first turn. None, where chunks that are
  /// passed on have the places in which parts are counted.
  template <class Block>
  static __device__ std::uint32_t pack_parts(const Block& block) {
    const RoleBlocks& blocks = block.launch.blocks;
    if (blocks.receive != 0) return 1;
    const std::uint32_t wanted = div_up(blocks.compute, block.schedule.column_tiles());
    std::uint32_t parts = 8;
    while (parts > 1 && blocks.pull < parts * wanted) parts /= 2;
    return parts;
  }
  __device__ bool last_part(Role role, std::uint32_t chunk, std::uint32_t parts) {
    const Role places = role == Role::kPull ? Role::kReceive : role;
    return CopyLeader::last_part(places, chunk, parts);
  }
  /// After the last job; the workers and the warp's other lanes return.
  __device__ void finish() {
    shared_.work.kind = MoeWork::Kind::kEnd;
    ptx::mbarrier_arrive(&shared_.work.posted);
    CopyLeader::finish();
  }

 private:
  static constexpr std::uint32_t kLeastRow = 512;  ///< bytes, of rows that lie apart

  static __device__ bool suits_engine(const CopyJob& job) {
    std::uint64_t bits = reinterpret_cast<std::uintptr_t>(job.source) | job.row_bytes;
    for (std::uint32_t t = 0; t < job.target_count; ++t)
      bits |= reinterpret_cast<std::uintptr_t>(job.targets[t]);
    if (job.rows > 1) bits |= job.source_stride | job.target_stride;
    return bits % 16 == 0 && (job.rows == 1 || job.row_bytes >= kLeastRow);
  }
  __device__ void set(const RoutingPlan& plan, std::uint32_t number) {
    shared_.work.plan = &plan;
    shared_.work.number = number;
  }
  /// Returns when it is done.
  __device__ void do_work(MoeWork::Kind kind) {
    shared_.work.kind = kind;
    ptx::mbarrier_arrive(&shared_.work.posted);
    ptx::mbarrier_wait(&shared_.work.done, turn_ % 2);
    ++turn_;
  }

  Shared& shared_;
  std::uint32_t turn_ = 0;
};

}  // namespace mk::kernels::cuda
