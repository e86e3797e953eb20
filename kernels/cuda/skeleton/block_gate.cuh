/// \file
/// The loading warp of a compute block as a block in the sense of comm/block.h: it waits as the
/// compute role of kernels/<operator>/roles.h does, with the same sites, deadlines and errors.
#pragma once

#include <cstdint>
#include <new>

#include "kernels/comm/block.h"
#include "kernels/cuda/core/gemm_policies.cuh"
#include "kernels/cuda/core/ptx.cuh"
#include "kernels/cuda/core/tile.h"
#include "kernels/cuda/skeleton/executor_common.cuh"
#include "kernels/cuda/skeleton/launch_state.h"
#include "kernels/cuda/skeleton/leader_warp.cuh"

namespace mk::kernels::cuda {

/// Copies a launch, word by word, by `threads` threads. (As ordinary memory: from a kernel's
/// parameters the lanes of a warp would read their words one after the other.)
template <class Launch>
__device__ __forceinline__ void copy_launch(unsigned char* to, const Launch& launch,
                                            std::uint32_t thread, std::uint32_t threads) {
  static_assert(sizeof(Launch) % 8 == 0);
  const auto* from = reinterpret_cast<const std::uint64_t*>(&launch);
  asm("" : "+l"(from));
  auto* words = reinterpret_cast<std::uint64_t*>(to);
  for (std::uint32_t i = thread; i < sizeof(Launch) / 8; i += threads) words[i] = from[i];
}

/// Where a compute block that ends with its tiles counts its groups as done when the inputs of the
/// last one are there. The poller is done, too, by the time that one is computed. A part of a
/// gate's parameters.
struct WaitsDone {
  std::uint32_t* groups_done;  ///< DeviceState's; null: they are counted elsewhere, or nobody looks
  std::uint32_t compute;       ///< blocks that have tiles from the start: of these
  std::uint32_t helpers;  ///< and of this one and later ones, which take some when they are free

  /// Whether this block counts: its groups do not then.
  __device__ bool counts() const {
    return groups_done != nullptr && (blockIdx.x < compute || blockIdx.x >= helpers);
  }
  /// Once. (The block has committed nothing that the poller is to bring.)
  __device__ void note() const {
    if (counts()) ptx::add_relaxed_gpu(groups_done, kGroupsOfBlock);
  }
};

/// Waits, and nothing else.
class GateExecutor {
 public:
  static __device__ void stores_done() {}
  static __device__ void acquire_fence() { __threadfence_system(); }
  /// What this thread has acquired before its later TMA loads.
  static __device__ void loads_begin() {
    ptx::may_dawdle();
    ptx::fence_acquired_to_async();
  }
  static __device__ std::uint64_t now_ns() { return ptx::now_ns(); }
  static __device__ bool pause(std::uint32_t attempt) { return look_at_clock(attempt); }
};

/// The same where tiles wait for many flags: the other lanes of the loading warp look at them for
/// the thread that loads.
class WarpGateExecutor : public GateExecutor {
 public:
  template <class Flag>
  __device__ std::uint32_t first_missing(std::uint32_t begin, std::uint32_t end,
                                         std::uint32_t wanted, Flag&& flag) {
    return warp_.first_missing(begin, end, wanted, flag);
  }
  __device__ std::uint32_t first_seen() const { return warp_.first_seen(); }
  /// After the last wait, by lane 0, who loads; the others' `assist` ends.
  __device__ void end() { warp_.end(); }
  __device__ void assist(std::uint32_t lane) { warp_.assist(lane); }

 private:
  LeaderWarp warp_;
};

/// In shared memory: these are too large for a loading thread's registers.
template <class Launch, template <class> class BlockOf, class Executor = GateExecutor>
struct BlockGateShared {
  using Block = BlockOf<Executor>;

  alignas(16) unsigned char launch_bytes[sizeof(Launch)];
  alignas(16) unsigned char block_bytes[sizeof(Block)];
  Executor executor;
  BlockTotals totals;
  /// A wait of the loading thread's has failed: what the block's storing threads have from here on
  /// is nothing, and where it would go may still be in use.
  std::uint32_t in_vain;

  /// All threads of the block; barriers come between this and `begin`, and after that.
  __device__ void prepare(const Launch& from) {
    copy_launch(launch_bytes, from, threadIdx.x, blockDim.x);
  }
  /// One thread.
  __device__ void begin(std::uint32_t epoch) {
    reinterpret_cast<Launch*>(launch_bytes)->epoch = epoch;
    totals = BlockTotals{};
    in_vain = 0;
  }
  __device__ const Launch& launch() const { return *reinterpret_cast<const Launch*>(launch_bytes); }
  __device__ std::uint32_t epoch() const { return launch().epoch; }
  /// The loading thread's.
  __device__ Block& make_block() {
    return *new (block_bytes) Block(executor, launch(), Role::kCompute, blockIdx.x, totals);
  }
};

/// An operator's InputBarrier (comm/tile_worker.h) as a gate of the core: asked by the loading
/// thread, with its block in shared memory.
template <class InputBarrier, class Launch, template <class> class BlockOf>
class BlockGate : public InputBarrier {
 public:
  using Params = typename InputBarrier::Params;
  using Shared = BlockGateShared<Launch, BlockOf>;

  __device__ BlockGate(const Params& params, Shared& shared)
      : InputBarrier(params, params.waits() ? &shared.make_block() : nullptr, shared.in_vain) {}
};

}  // namespace mk::kernels::cuda
