/// \file
/// The frame of a collective's kernel: operator_kernel.cuh's without a product. All blocks are
/// alike. Their warpgroups are, in this order, the poller (if the host has words to look at), those
/// that send, that receive, that stream within the node (share or reduce), and those that copy from
/// or to the caller's memory (Op::kCaller). All blocks of all ranks are resident at the same time,
/// or the waits end at their deadlines.
///
/// An operator is a type:
///
///     struct Op : MultipliesNothing {
///       struct Config { using Element; };              of the workers' sums
///       using Launch;                                  of its protocol.h
///       template <class Executor> using Block;
///       using Executor;                                the leaders' (executor.cuh)
///       static constexpr Role kStreams, kCaller;
///       static constexpr bool kRounds;                  as of a product's
///       static bool run(Group<Op>&, Block<Executor>&);   the block's role
///     };
#pragma once

#include <type_traits>

#include "kernels/cuda/host/collective_arguments.h"
#include "kernels/cuda/skeleton/operator_kernel.cuh"

namespace mk::kernels::cuda {

/// The base of such an operator.
struct MultipliesNothing {
  static constexpr bool kHelps = false;
};

template <class Op>
requires std::is_base_of_v<MultipliesNothing, Op>
struct OperatorParams<Op> {
  typename Op::Launch launch;  ///< without the epoch
  FrameArguments frame;
  void* c = nullptr;
  std::uint64_t ldc = 0;
};

inline constexpr std::uint32_t kCollectiveThreads = kGroupsOfBlock * kGroupThreads;
/// The workers' loads (kLoadsMax). With more, ptxas spills registers of sums in bf16.
inline constexpr int kCollectiveLoads = 20;

/// Warpgroup `index` of all but the poller.
template <class Op>
__device__ __forceinline__ void run_collective(Group<Op>& group, std::uint32_t index) {
  const RoleBlocks& blocks = group.launch.blocks;
  // The header of shared rows says the same as a record.
  constexpr bool kHasRecords = Op::kStreams != Role::kShare;
  if (kHasRecords && index == 0 && group.launch.context.world.locals > 1 && !group.announce())
    return;
  if (index < blocks.send) {
    shm::RingProducer& lane = group.state.lanes[index];
    shm::RingProducer& session = group.frame.host.session_lanes[index];
    lane.produced = session.produced;
    group.run(Role::kSend, index, [&](auto& block) { return Op::run(group, block); });
    session.produced = lane.produced;
    return;
  }
  index -= blocks.send;
  const std::uint32_t streams = Op::kStreams == Role::kShare ? blocks.share : blocks.reduce;
  Role role = Op::kCaller;
  if (index < blocks.receive) {
    role = Role::kReceive;
  } else if (index - blocks.receive < streams) {
    role = Op::kStreams;
    index -= blocks.receive;
  } else {
    index -= blocks.receive + streams;
    if (index >= blocks.compute) return;
  }
  group.run(role, index, [&](auto& block) { return Op::run(group, block); });
}

/// A real call, which a kernel without wgmma may have: the leader's registers do not stand in the
/// workers' way.
template <class Op>
__device__ __noinline__ void lead_apart(const OperatorParams<Op>& params, GroupShared<Op>& shared,
                                        std::uint32_t epoch, std::uint32_t index) {
  Group<Op> group(params, shared, epoch);
  run_collective(group, index);
  group.finish();
}

template <class Op>
__global__ void __launch_bounds__(kCollectiveThreads, 1)
    collective_kernel(const __grid_constant__ OperatorParams<Op> params) {
  constexpr std::uint32_t kLaunchesMax = 0x7fffffffu;
  extern __shared__ __align__(1024) std::uint8_t dynamic_shared[];
  auto* const groups = reinterpret_cast<GroupShared<Op>*>(dynamic_shared);
  DeviceState& state = *params.frame.state;
  const std::uint32_t group_index = threadIdx.x / kGroupThreads;
  const std::uint32_t thread = threadIdx.x % kGroupThreads;
  const std::uint32_t number = blockIdx.x * kGroupsOfBlock + group_index;
  const std::uint32_t stop = shm::load_relaxed(&state.local.stop);
  const std::uint32_t epoch = shm::load_relaxed(&state.epoch) + 1;
  const bool polls = number < params.frame.pollers;
  const std::uint32_t index = number - params.frame.pollers;
  if (!polls && index < params.launch.blocks.send) prefetch_lane(params.frame, index, thread);
  prepare_groups<Op>(groups, params.launch);
  if (blockIdx.x == gridDim.x - 1) clear_account(state.accounts[(epoch + 1) % 2]);
  if (threadIdx.x == 0) {
    ptx::max_relaxed_gpu(&state.accounts[epoch % 2].begin_ns_inverted, ~ptx::now_ns());
    if (epoch > kLaunchesMax) shm::store_release(&state.local.stop, 1u);
  }
  // One thread's look counts: another block may fail meanwhile.
  const int seen = __syncthreads_or(threadIdx.x == 0 && (stop != 0 || epoch > kLaunchesMax));
  if (__any_sync(0xffffffffu, seen) != 0) {
    if (threadIdx.x == 0) {
      // The poller may have begun before the launch failed: it waits for these groups, too.
      shm::fetch_add(&state.groups_done, kGroupsOfBlock);
      end_launch(params.launch, params.frame);
    }
    return;
  }
  ptx::may_dawdle();
  GroupShared<Op>& shared = groups[group_index];
  if (polls) {
    if (thread < 32) {
      Poller poller(params.frame.host, state, params.launch, epoch,
                    reinterpret_cast<std::uint32_t*>(groups + kGroupsOfBlock));
      poller.run(gridDim.x * kGroupsOfBlock - params.frame.pollers);
    }
  } else if (thread >= 32) {
    if constexpr (Op::Executor::kHasWorkers)
      work<typename Op::Config::Element, Op::kRounds, kCollectiveLoads>(shared.executor,
                                                                        thread - 32, kWorkers);
  } else {
    if (thread == 0) {
      lead_apart(params, shared, epoch, index);
    } else {
      shared.warp.assist(thread);
    }
    __syncwarp();
  }
  __syncthreads();
  if (threadIdx.x == 0) end_launch(params.launch, params.frame);
}

template <class Op>
inline constexpr std::size_t kCollectiveShared = sizeof(GroupShared<Op>) * kGroupsOfBlock
                                                 + kPolledFlagsMax * 4;

template <class Op>
cudaError_t prepare_collective() {
  static_assert(kCollectiveShared<Op> <= kSharedBytesMax);
  return cudaFuncSetAttribute(collective_kernel<Op>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(kCollectiveShared<Op>));
}

template <class Op>
cudaError_t launch_collective(const CollectiveArguments<typename Op::Launch>& arguments,
                              cudaStream_t stream) {
  const OperatorParams<Op> params{arguments.launch, arguments.frame};
  collective_kernel<Op>
      <<<params.frame.comm_blocks.count(), kCollectiveThreads, kCollectiveShared<Op>, stream>>>(
          params);
  return cudaGetLastError();
}

template <class Op>
inline constexpr CollectiveKernel<typename Op::Launch> kCollectiveKernel = {
    .prepare = prepare_collective<Op>, .launch = launch_collective<Op>};

}  // namespace mk::kernels::cuda
