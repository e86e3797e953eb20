/// \file
/// A group of an operator's kernel as its leader sees it: what runs a role, and what the rank
/// counts of it. (Who is what: operator_kernel.cuh.)
#pragma once

#include <cuda/atomic>
#include <new>

#include "kernels/comm/operator_block.h"
#include "kernels/cuda/core/gemm_core.cuh"
#include "kernels/cuda/host/operator_arguments.h"
#include "kernels/cuda/skeleton/block_gate.cuh"
#include "kernels/cuda/skeleton/executor.cuh"

namespace mk::kernels::cuda {

/// What an operator makes of its sums before they are stored.
template <class Op>
struct EpilogueTypeOf {
  using Type = RoundedSums;
};
template <class Op>
requires requires { typename Op::Epilogue; }
struct EpilogueTypeOf<Op> {
  using Type = typename Op::Epilogue;
};
template <class Op>
using EpilogueOf = typename EpilogueTypeOf<Op>::Type;

template <class Op>
struct OperatorParams {
  GemmParams<typename Op::Order, typename Op::Gate, typename Op::Store, EpilogueOf<Op>> gemm;
  typename Op::Launch launch;  ///< without the epoch
  FrameArguments frame;
  void* c = nullptr;  ///< where the leaders' c_at() points, or null
  std::uint64_t ldc = 0;
};

/// Shared memory of a group. A compute block has it where its stages were.
template <class Op>
struct GroupShared {
  typename Op::Executor::Shared executor;
  LeaderWarp warp;
  alignas(16) unsigned char launch[sizeof(typename Op::Launch)];
  alignas(16) unsigned char block[sizeof(typename Op::template Block<typename Op::Executor>)];
};

/// Enters what a group (or a block's tiles) did into the rank's account of the launch.
__device__ __forceinline__ void account_for(DeviceState& state, std::uint32_t epoch, Role kind,
                                            const BlockTotals& totals) {
  RoleAccount& to = state.accounts[epoch % 2].roles[static_cast<std::uint32_t>(kind)];
  ptx::max_relaxed_gpu(&to.end_ns, ptx::now_ns());
  ptx::add_relaxed_gpu(&to.groups, 1);
  ptx::add_relaxed_gpu(&to.waits, totals.waits.count);
  ptx::add_relaxed_gpu(&to.wait_ns, totals.waits.ns);
  if (kind != Role::kSend) return;
  ptx::add_relaxed_gpu(&to.commands, totals.commands);
  ptx::add_relaxed_gpu(&to.network_bytes, totals.network_bytes);
}
/// A compute block has no tiles left.
__device__ __forceinline__ void tiles_done(DeviceState& state, std::uint32_t epoch,
                                           const BlockTotals& totals) {
  account_for(state, epoch, Role::kCompute, totals);
  // Orders nothing: a reader of a tile looks at its own flag.
  shm::store_relaxed(&state.local.done_by(Role::kCompute)[blockIdx.x], epoch);
}

/// A group of a launch, on its leader.
template <class Op>
class Group {
 public:
  using Executor = typename Op::Executor;
  using Block = typename Op::template Block<Executor>;
  using Launch = typename Op::Launch;

  __device__ Group(const OperatorParams<Op>& params, GroupShared<Op>& shared, std::uint32_t epoch)
      : launch(*reinterpret_cast<Launch*>(shared.launch)),
        state(*params.frame.state),
        frame(params.frame),
        params_(params),
        leader_(shared.warp, *params.frame.state, shared.executor, params.c, params.ldc),
        block_(shared.block) {
    launch.epoch = epoch;
    if constexpr (Op::kHelps) over_ = params.gemm.gate.waits_done.counts();
  }

  Launch& launch;  ///< this group's copy
  DeviceState& state;
  const FrameArguments& frame;
  __device__ const OperatorParams<Op>& params() const { return params_; }

  /// Runs `role(block)` as block `index` of `kind`; false: the launch has failed. `goes_on`: this
  /// group has another role after that.
  template <class F>
  __device__ bool run(Role kind, std::uint32_t index, F&& role, bool goes_on = false) {
    BlockTotals totals;
    auto& block = *new (block_) Block(leader_, launch, kind, index, totals);
    ptx::may_dawdle();
    const bool completed = role(block);
    if (blockIdx.x >= launch.blocks.compute && !goes_on) waits_over();
    leader_.stores_done();
    ptx::may_dawdle();
    account(kind, totals);
    return completed;
  }
  /// Calls `take(block, chunk, part)` for the steps in their order, each taken by the first group
  /// of the rank that has nothing else to do. `counter` is for that. `on_last()`: when this group
  /// has begun its last one, or gets none.
  template <class F, class OnLast>
  __device__ bool take_steps(Block& block, std::uint32_t& counter, const ChunkSteps& steps,
                             F&& take, OnLast&& on_last) {
    const std::uint32_t count = steps.count();
    const ::cuda::atomic_ref<std::uint32_t, ::cuda::thread_scope_device> taken(counter);
    std::uint32_t index = taken.fetch_add(1, ::cuda::memory_order_relaxed);
    if (index >= count) on_last();
    while (index < count) {
      ptx::may_dawdle();
      const ChunkSteps::Step step = steps.at(index);
      if (!take(block, step.chunk, step.part)) return false;
      // On its way while the workers do this one.
      const std::uint32_t next = taken.fetch_add(1, ::cuda::memory_order_relaxed);
      if (next >= count) on_last();
      // There is none left for each: nobody begins another one before this is done.
      if (count - index <= kGroupsOfBlock * gridDim.x) block.executor.stores_done();
      index = next;
    }
    return true;
  }
  /// The receive role of a rank that sums over the nodes: `receive(block, chunk, part)` sums a part
  /// of a chunk.
  template <class F>
  __device__ bool receive_steps(Block& block, F&& receive) {
    const auto on_last = [this] {
      if (!Op::waits_after_receive(launch)) waits_over();
    };
    if (!take_steps(block, state.receives_taken, frame.steps.arrivals, receive, on_last))
      return false;
    // Else nobody waits for that.
    if (block.schedule.flags().has_releases()) block.publish_done(Op::receiving_groups(launch));
    return true;
  }
  /// The same in a compute block that has no tiles left.
  __device__ bool join_receive() {
    return run(Role::kReceive, launch.blocks.receive + compute_index(),
               [this](Block& block) { return Op::receive(*this, block); });
  }
  /// Its place among the groups of the compute blocks.
  __device__ std::uint32_t compute_index() const {
    return blockIdx.x * kGroupsOfBlock + threadIdx.x / kGroupThreads;
  }
  /// As block 0 of no role in particular: tells the local ranks that this launch has begun.
  __device__ bool announce() {
    BlockTotals totals;
    auto& block = *new (block_) Block(leader_, launch, Role::kCompute, 0, totals);
    if (!block.await_all_finished(launch.epoch - kLaunchRecordBanks)) return false;
    announce_launch(launch);
    return true;
  }
  __device__ void account(Role kind, const BlockTotals& totals) {
    account_for(state, launch.epoch, kind, totals);
  }
  /// This group waits for nothing more, and commits nothing more: the poller need not stay for it.
  /// Once or more often.
  __device__ void waits_over() {
    // Orders what the group has committed before the poller's last look.
    if (frame.pollers != 0 && !over_) ptx::add_release_gpu(&state.groups_done, 1u);
    over_ = true;
  }
  /// After the last role.
  __device__ void finish() {
    leader_.finish();
    waits_over();
  }

 private:
  const OperatorParams<Op>& params_;
  bool over_ = false;
  Executor leader_;
  unsigned char* block_;
};

}  // namespace mk::kernels::cuda
