/// \file
/// The executor of GEMM+Combine's roles outside the compute blocks is a group. Its leader runs
/// the role. Its other three warps, the workers, are the lanes of the index, look at all flags of a
/// run of tokens at once, and add up its rows.
#pragma once

#include <cstdint>

#include "kernels/cuda/skeleton/executor.cuh"
#include "kernels/ops/combine/index.h"
#include "kernels/ops/combine/sm90_sums.cuh"
#include "kernels/ops/moe/sm90_leader.cuh"

namespace mk::kernels::cuda {

class CombineLeader;

/// The workers of a group as lanes of the index.
struct CombineLanes : MoeLanes {
  static __device__ void most(std::uint32_t* word, std::uint32_t value) { atomicMax(word, value); }
  static __device__ void add(std::uint32_t* word, std::uint32_t value) { atomicAdd(word, value); }
  static __device__ void add(std::uint64_t* word, std::uint64_t value) {
    static_assert(sizeof(unsigned long long) == sizeof(std::uint64_t));
    atomicAdd(reinterpret_cast<unsigned long long*>(word), value);
  }
};

/// One piece of work, from a leader to its workers.
struct CombineWork {
  enum class Kind : std::uint32_t { kPiece, kLook, kSum, kEnd };

  std::uint64_t posted;  ///< to the workers: it is written
  std::uint64_t done;    ///< to the leader: every worker is done with it
  const CombineBlock<CombineLeader>* block;
  std::uint16_t* out;  ///< the caller's output
  Kind kind;
  gemm_combine::CombinePiece piece;
  CombineRun run;
  std::uint32_t begin;              ///< kLook: from this one of what the run awaits on
  std::uint32_t missing;            ///< the first of them that is not there
  std::uint32_t scratch[kWorkers];  ///< of the lanes of the index
};

/// Shared memory of such a group.
struct CombineGroupShared {
  CombineWork work;

  /// One thread, before the others' first use.
  __device__ void begin() {
    ptx::mbarrier_init(&work.posted, 1);
    ptx::mbarrier_init(&work.done, kWorkers);
  }
};

class CombineLeader : public LeaderBase {
 public:
  using Shared = CombineGroupShared;
  using Block = CombineBlock<CombineLeader>;
  static constexpr bool kHasWorkers = true;
  /// The fewer, the more groups share in the last ones; a look at their flags costs two
  /// microseconds.
  static constexpr std::uint32_t kTokensAtOnce = 2;

  /// `c`: the caller's output.
  __device__ CombineLeader(LeaderWarp& warp, DeviceState& state, Shared& shared, void* c,
                           std::uint64_t /*ldc*/)
      : LeaderBase(warp, state), work_(shared.work) {
    work_.out = static_cast<std::uint16_t*>(c);
  }

  using LeaderBase::first_missing;
  /// See CombineBlock::await_run_of.
  __device__ std::uint32_t first_missing(const Block& block, const CombineRun& run,
                                         std::uint32_t begin, std::uint64_t* seen);
  __device__ void do_piece(const Block& block, gemm_combine::CombinePiece piece) {
    work_.piece = piece;
    do_work(CombineWork::Kind::kPiece, block);
  }
  __device__ void sum_run(const Block& block, const CombineRun& run) {
    work_.run = run;
    do_work(CombineWork::Kind::kSum, block);
  }
  /// All work is done when it has been asked for.
  static __device__ void stores_done() {}
  static __device__ void loads_begin() {}
  /// After the last piece of work; the workers and the warp's other lanes return.
  __device__ void finish() {
    work_.kind = CombineWork::Kind::kEnd;
    ptx::mbarrier_arrive(&work_.posted);
    end_warp();
  }

 private:
  /// Returns when it is done.
  __device__ void do_work(CombineWork::Kind kind, const Block& block) {
    work_.kind = kind;
    work_.block = &block;
    ptx::mbarrier_arrive(&work_.posted);
    ptx::mbarrier_wait(&work_.done, turn_ % 2);
    ++turn_;
  }

  CombineWork& work_;
  std::uint32_t turn_ = 0;
};

__device__ inline std::uint32_t CombineLeader::first_missing(const Block& block,
                                                             const CombineRun& run,
                                                             std::uint32_t begin,
                                                             std::uint64_t* seen) {
  const std::uint32_t left = block.awaited(run) - begin;
  const std::uint32_t end = begin + (left < kWorkers ? left : kWorkers);
  work_.run = run;
  work_.begin = begin;
  work_.missing = end;
  do_work(CombineWork::Kind::kLook, block);
  const std::uint32_t missing = work_.missing;
  if (missing == begin) *seen = shm::load_relaxed(block.awaited_flag(run, begin));
  return missing;
}

/// A worker's life in a role; see executor.cuh.
template <class Element, bool kRounds>
__device__ __forceinline__ void work(CombineGroupShared& shared, std::uint32_t thread,
                                     std::uint32_t /*threads*/) {
  CombineWork& work = shared.work;
  for (std::uint32_t turn = 0;; ++turn) {
    while (!ptx::mbarrier_try_wait(&work.posted, turn % 2)) {
    }
    switch (work.kind) {
      case CombineWork::Kind::kPiece:
        gemm_combine::do_piece(*work.block, work.piece, CombineLanes{{thread, work.scratch}});
        break;
      case CombineWork::Kind::kLook: {
        const CombineBlock<CombineLeader>& block = *work.block;
        const std::uint32_t which = work.begin + thread;
        if (which >= block.awaited(work.run)) break;
        const std::uint32_t* const flag = block.awaited_flag(work.run, which);
        if (flag != nullptr && !shm::epoch_reached(shm::load_acquire(flag), block.epoch))
          atomicMin(&work.missing, which);
        break;
      }
      case CombineWork::Kind::kSum:
        __syncwarp();
        if (work.block->launch.plan.shape.partials == CombinePartials::kF32) {
          sum_tokens<Element, true>(*work.block, work.run, work.out, thread);
        } else {
          sum_tokens<Element, false>(*work.block, work.run, work.out, thread);
        }
        break;
      case CombineWork::Kind::kEnd:
        return;
    }
    ptx::mbarrier_arrive(&work.done);
  }
}

}  // namespace mk::kernels::cuda
