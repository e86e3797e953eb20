/// \file
/// The frame of every operator's kernel: who is what, and what all launches begin and end with.
///
/// Blocks 0 .. compute - 1 run the GEMM core. When their tiles are done, each of their groups does
/// what the operator has for it then. The groups of the other blocks are, in this order, the poller
/// (if the host has words to look at), the send role and the receive role. The role that streams
/// within the node (reduce or share) is the last. All blocks of all ranks are resident at the same
/// time, or the waits end at their deadlines.
///
/// An operator is a type:
///
///     struct Op {
///       using Config, Order, Gate, Store;              the policies of the core
///       using Epilogue;                                likewise, if not RoundedSums
///       using Launch;                                  kernels/<operator>/launch.h
///       using Arguments;                               OperatorArguments<Launch> or derived
///       static OperatorParams<Op> params(const Arguments&);
///       template <class Executor> using Block;         kernels/<operator>/block.h
///       using Executor;                                the leaders' (executor.cuh)
///       static constexpr Role kStreams;                reduce or share
///       static constexpr bool kRounds;                 of an executor with workers: whether jobs
///                                                      have SumJob::rounded_sources
///       static Warpgroups receiving_groups(const Launch&);  of who uses Group::receive_steps: the
///                                                      groups that call it in all
///       static constexpr bool kHelps;                  blocks that are done with that take tiles,
///                                                      too: then the order takes them at run time
///       static bool stream(Group<Op>&, uint32_t index, bool goes_on = false);
///                                                      `goes_on`: the group receives after that
///       static bool send(Block<Executor>&);
///       static bool receive(Group<Op>&, Block<Executor>&);
///       static bool waits_after_receive(const Launch&);  of who uses Group::receive_steps: whether
///                                                      a group that sums what came waits for
///                                                      anything else after that
///       static bool ends_with_tiles(const Launch&);    compute blocks then have nothing to do; the
///                                                      gate goes by waits_done()
///       static bool after_tiles(Group<Op>&);           each group of a compute block, if not
///     };
#pragma once

#include <cstddef>

#include "kernels/cuda/skeleton/group.cuh"
#include "kernels/cuda/skeleton/poller.cuh"

namespace mk::kernels::cuda {

/// A launch's parameters: what is in its arguments, `tiles` of them in all, and what the policies
/// need.
template <class Op>
OperatorParams<Op> make_params(const typename Op::Arguments& arguments, std::uint32_t tiles,
                               const typename Op::Order::Params& order,
                               const typename Op::Gate::Params& gate,
                               const typename Op::Store::Params& store) {
  OperatorParams<Op> params = {.gemm = {.a = arguments.product.a,
                                        .b = arguments.product.b,
                                        .a_box_rows = arguments.product.a_box_rows,
                                        .m_blocks = static_cast<int>(tiles),
                                        .k_blocks = arguments.product.k_blocks,
                                        .order = order,
                                        .gate = gate,
                                        .store = store,
                                        .epilogue = {}},
                               .launch = arguments.launch,
                               .frame = arguments.frame,
                               .c = arguments.c,
                               .ldc = arguments.ldc};
  if constexpr (kHasForms<EpilogueOf<Op>>) {
    params.gemm.epilogue.what = arguments.epilogue;
    params.gemm.epilogue.columns = arguments.launch.plan.max.n;
  }
  return params;
}

/// For the gate of an operator whose compute blocks may end with their tiles.
template <class Op>
WaitsDone waits_done(const typename Op::Arguments& arguments) {
  const FrameArguments& frame = arguments.frame;
  const RoleBlocks& blocks = arguments.launch.blocks;
  const bool counts = frame.pollers != 0 && Op::ends_with_tiles(arguments.launch);
  constexpr std::uint32_t kNone = 0xffffffffu;
  return {counts ? &frame.state->groups_done : nullptr, blocks.compute,
          Op::kHelps ? first_streaming_block(frame, blocks).count() : kNone};
}

/// Registers of a thread outside the core: an equal share of what the block is given at its start.
inline constexpr int kRoleRegisters = 168;

// A gate may wait for several flags before a load, but hardly for two that come as late as that.
static_assert(2 * kWaitTimeoutMax < std::chrono::nanoseconds(ptx::kBlockDeadlineNs));

/// The send role as block `index`, through that lane of the session.
template <class Op>
__device__ __forceinline__ void send(Group<Op>& group, std::uint32_t index) {
  shm::RingProducer& lane = group.state.lanes[index];
  shm::RingProducer& session = group.frame.host.session_lanes[index];
  lane.produced = session.produced;
  group.run(Role::kSend, index, [](auto& block) { return Op::send(block); });
  session.produced = lane.produced;
}

/// Group `index` of those outside the compute blocks, the poller not counted.
template <class Op>
__device__ __forceinline__ void run_comm(Group<Op>& group, std::uint32_t index) {
  const RoleBlocks& blocks = group.launch.blocks;
  // Who shares rows says in their header what a record says.
  constexpr bool kHasRecords = Op::kStreams != Role::kShare;
  if (kHasRecords && index == 0 && group.launch.context.world.locals > 1 && !group.announce())
    return;
  const FrameArguments& frame = group.frame;
  const Warpgroups streams = Op::kStreams == Role::kShare ? groups_that_only_share(frame, blocks)
                                                          : warpgroups_of(blocks.reduce);
  if (index < blocks.send) return send(group, index);
  index -= blocks.send;
  const Warpgroups receives = warpgroups_of(blocks.receive);
  if (index < receives) {
    if constexpr (Op::kStreams == Role::kShare) {
      if (frame.sharing_receivers != 0 && !Op::stream(group, streams + index, true)) return;
    }
    group.run(Role::kReceive, index, [&](auto& block) { return Op::receive(group, block); });
    return;
  }
  index -= receives;
  if (index >= streams) return;
  const Warpgroups before = frame.pollers + warpgroups_of(blocks.send) + receives;
  Op::stream(group, spread_stream(index, before, streams));
}

/// Which blocks a piece of code is for: where an operator has it twice, each half once.
enum class Blocks { kAll, kCompute, kOthers };

template <Blocks kOf>
__device__ __forceinline__ bool is_compute(std::uint32_t compute_blocks) {
  if constexpr (kOf == Blocks::kAll) {
    return blockIdx.x < compute_blocks;
  } else {
    return kOf == Blocks::kCompute;
  }
}

/// The place of a group among those outside the compute blocks, the poller not counted (which has
/// the largest of all numbers).
template <class Op>
__device__ __forceinline__ std::uint32_t comm_index(const OperatorParams<Op>& params,
                                                    std::uint32_t group) {
  const std::uint32_t block = blockIdx.x - params.launch.blocks.compute;
  return block * kGroupsOfBlock + group - params.frame.pollers;
}

/// Has thread `thread` bring a part of send group `index`'s lane near, while the block makes ready:
/// the leader would else wait for one word of it after the other.
__device__ __forceinline__ void prefetch_lane(const FrameArguments& frame, std::uint32_t index,
                                              std::uint32_t thread) {
  constexpr std::uint32_t kWords = sizeof(shm::RingProducer) / sizeof(std::uint64_t);
  // The rail peers of so many nodes, by lines of the cache.
  constexpr std::uint32_t kPeersOfLine = 128 / sizeof(RailPeer);
  constexpr std::uint32_t kPeersNear = 4;
  static_assert(kPeersNear * kPeersOfLine <= shm::kNodesMax && sizeof(RailPeer) == 16);
  if (thread < kWords) {
    const shm::RingProducer* lane = &frame.state->lanes[index];
    ptx::prefetch_word(reinterpret_cast<const std::uint64_t*>(lane) + thread);
  } else if (thread == kWords) {
    ptx::prefetch_word(&frame.host.session_lanes[index].produced);
  } else if (thread - kWords <= kPeersNear) {
    const RailPeer* peers = frame.state->rail_peers + (thread - kWords - 1) * kPeersOfLine;
    ptx::prefetch_word(reinterpret_cast<const std::uint64_t*>(peers));
  }
}

/// The leader's part.
template <class Op, Blocks kOf>
__device__ __forceinline__ void lead(const OperatorParams<Op>& params, GroupShared<Op>& shared,
                                     const BlockTotals& of_tiles, std::uint32_t epoch) {
  const std::uint32_t group_index = threadIdx.x / kGroupThreads;
  const std::uint32_t compute = params.launch.blocks.compute;
  Group<Op> group(params, shared, epoch);
  if (is_compute<kOf>(compute)) {
    if (group_index == 0) tiles_done(group.state, epoch, of_tiles);
    Op::after_tiles(group);
  } else {
    run_comm(group, comm_index(params, group_index));
  }
  group.finish();
}

/// Whether this is the block one of whose groups is the poller.
__device__ __forceinline__ bool has_poller(const FrameArguments& frame, const RoleBlocks& blocks) {
  return frame.pollers != 0 && blockIdx.x == blocks.compute;
}

/// Makes the groups of a block ready, by all its threads; a barrier of the block comes before they
/// run. `launch`: what they copy.
template <class Op>
__device__ __forceinline__ void prepare_groups(GroupShared<Op>* groups,
                                               const typename Op::Launch& launch) {
  GroupShared<Op>& shared = groups[threadIdx.x / kGroupThreads];
  const std::uint32_t thread = threadIdx.x % kGroupThreads;
  copy_launch(shared.launch, launch, thread, kGroupThreads);
  if constexpr (Op::Executor::kHasWorkers) {
    if (thread == 0) shared.executor.begin();
  }
}

/// Everything but the tiles, by all threads of a block. `groups`: kGroupsOfBlock, and in a block
/// outside the compute blocks, where they are ready, as many words as there are flags behind them.
/// `tiles`: what the compute blocks' loads had.
template <Blocks kOf, class Op>
__device__ __forceinline__ void run_groups(const OperatorParams<Op>& params,
                                           GroupShared<Op>* groups,
                                           const typename Op::Gate::Shared& tiles,
                                           std::uint32_t epoch) {
  const std::uint32_t group = threadIdx.x / kGroupThreads;
  const std::uint32_t thread = threadIdx.x % kGroupThreads;
  GroupShared<Op>& shared = groups[group];
  if (is_compute<kOf>(params.launch.blocks.compute)) {
    prepare_groups<Op>(groups, tiles.launch());
    __syncthreads();
  }
  const bool polls =
      kOf != Blocks::kCompute && group == 0 && has_poller(params.frame, params.launch.blocks);
  if (polls) {
    if (thread < 32) {
      Poller poller(params.frame.host, *params.frame.state, params.launch, epoch,
                    reinterpret_cast<std::uint32_t*>(groups + kGroupsOfBlock));
      poller.run(working_groups(params.frame, params.launch.blocks));
    }
  } else if (thread >= 32) {
    if constexpr (Op::Executor::kHasWorkers)
      work<typename Op::Config::Element, Op::kRounds>(shared.executor, thread - 32, kWorkers);
  } else {
    if (thread == 0) {
      lead<Op, kOf>(params, shared, tiles.totals, epoch);
    } else {
      shared.warp.assist(thread);
    }
    __syncwarp();
  }
  __syncthreads();
}

/// Whether a block outside the compute blocks may take tiles when its groups have ended. Over nodes
/// only where compute blocks end with theirs: no release tells then that these alone have read a
/// bank. The poller stays until this block, too, has its last rows (WaitsDone).
template <class Op>
__device__ __forceinline__ bool may_help(const OperatorParams<Op>& params) {
  return (params.launch.context.world.nodes == 1 || Op::ends_with_tiles(params.launch)) &&
         blockIdx.x >= first_streaming_block(params.frame, params.launch.blocks);
}
/// A block that helped has done its last tile.
__device__ __forceinline__ void note_tiles_done(DeviceState& state, std::uint32_t epoch) {
  RoleAccount& tiles = state.accounts[epoch % 2].roles[static_cast<std::uint32_t>(Role::kCompute)];
  ptx::max_relaxed_gpu(&tiles.end_ns, ptx::now_ns());
}

/// By a block's threads, when a launch begins: the next one's account is zero then. (The last block
/// to end would have to wait for that code.)
__device__ __forceinline__ void clear_account(LaunchAccount& account) {
  constexpr std::uint32_t kWords = sizeof(LaunchAccount) / sizeof(std::uint64_t);
  static_assert(sizeof(LaunchAccount) % sizeof(std::uint64_t) == 0 && kWords <= kGroupThreads);
  if (threadIdx.x < kWords) reinterpret_cast<std::uint64_t*>(&account)[threadIdx.x] = 0;
}

/// By the last block of a launch that has not failed here: whether one of another local rank has.
/// What that rank's DMA engines have brought since may lie where this launch still read rows.
__device__ __forceinline__ void heed_peers(const Launch& launch) {
  const std::uint32_t failed = shm::load_acquire(launch.control.peer_failed);
  if (failed == 0) return;
  const World& world = launch.context.world;
  const std::uint32_t rank = failed - 1;
  fail_wait(
      launch.control,
      {Role::kCompute, FlagKind::kFinished, 0, rank, {rank - world.node * world.locals, 0}, 0},
      WaitEnd::kPeerFailed, launch.epoch, 0, 0);
}

/// By the last block of a launch: what it has not told DMA engines, as it failed first, they do not
/// wait for. (The other ranks have been told of the failure.)
__device__ __forceinline__ void let_dma_end(DeviceState& state, std::uint32_t epoch) {
  if (shm::load_acquire(&state.local.stop) == 0) return;
  if (shm::load_relaxed(&state.dma_started) != epoch) shm::store_release(&state.dma_go, 1u);
  shm::store_release(&state.dma_pieces, kAllPieces);
}

/// The last block of a launch: tells the local ranks, of a failure also the host, and advances the
/// epoch.
__device__ inline void end_launch(const Launch& launch, const FrameArguments& frame) {
  DeviceState& state = *frame.state;
  // On its way while the next line waits; kept from the beginning it would be one register more.
  const std::uint32_t epoch = shm::load_relaxed(&state.epoch) + 1;
  if (ptx::fetch_add_gpu(&state.blocks_done, 1u) + 1 != gridDim.x) return;
  shm::store_relaxed(&state.blocks_done, 0u);
  shm::store_relaxed(&state.groups_done, 0u);
  shm::store_relaxed(&state.streams_taken, 0u);
  shm::store_relaxed(&state.receives_taken, 0u);
  shm::store_relaxed(&state.tiles_taken, 0u);
  if (frame.heeds_peers && shm::load_acquire(&state.local.stop) == 0) heed_peers(launch);
  if (shm::load_acquire(&state.local.stop) == 0) {
    announce_end(launch.context, epoch);
  } else if (frame.report->failed == HostReport::kNone) {
    HostReport& report = *frame.report;
    report.epoch = epoch;
    report.record = state.local.failure;
    announce_failure(launch.context);
    const std::byte* own = launch.context.workspaces[launch.context.world.local];
    report.peer_failed =
        shm::load_acquire(reinterpret_cast<const std::uint32_t*>(own + WorkspaceHead::failed()));
    const bool spent = state.local.failure.claimed == 0;
    shm::store_release(&report.failed, spent ? std::uint32_t{HostReport::kLaunchesSpent}
                                             : std::uint32_t{HostReport::kWait});
  }
  if (frame.by_dma) let_dma_end(state, epoch);
  state.accounts[epoch % 2].end_ns = ptx::now_ns();
  // The next launch begins after this one.
  shm::store_relaxed(&state.epoch, epoch);
}

template <class Op>
using OperatorShared =
    SharedOf<typename Op::Config, typename Op::Gate, typename Op::Store, typename Op::Order>;

template <class Op>
__global__ void __launch_bounds__(Op::Config::kThreads, 1)
    operator_kernel(const __grid_constant__ OperatorParams<Op> params) {
  using Config = typename Op::Config;
  using Shared = OperatorShared<Op>;
  extern __shared__ __align__(1024) std::uint8_t dynamic_shared[];
  static_assert(Config::kThreads == kGroupsOfBlock * kGroupThreads);
  static_assert(sizeof(GroupShared<Op>) * kGroupsOfBlock <= offsetof(Shared, stage_full),
                "it lies where the core's stages and pieces were, its barriers elsewhere");
  static_assert(sizeof(GroupShared<Op>) * kGroupsOfBlock + kPolledFlagsMax * 4 <= sizeof(Shared));
  constexpr std::uint32_t kLaunchesMax = 0x7fffffffu;
  auto& shared = *reinterpret_cast<Shared*>(dynamic_shared);

  DeviceState& state = *params.frame.state;
  // Both are on their way together, while the block makes ready for tiles.
  const std::uint32_t stop = shm::load_relaxed(&state.local.stop);
  std::uint32_t epoch = shm::load_relaxed(&state.epoch) + 1;
  const std::uint32_t compute = params.launch.blocks.compute;
  const auto prepare = [&] {
    prepare_core<Config>(params.gemm, shared);
    shared.gate.prepare(params.launch);
  };
  auto* const groups = reinterpret_cast<GroupShared<Op>*>(dynamic_shared);
  if (blockIdx.x < compute) {
    prepare();
  } else {
    const std::uint32_t index = comm_index(params, threadIdx.x / kGroupThreads);
    if (index < params.launch.blocks.send)
      prefetch_lane(params.frame, index, threadIdx.x % kGroupThreads);
    prepare_groups<Op>(groups, params.launch);
  }
  if (blockIdx.x == gridDim.x - 1) clear_account(state.accounts[(epoch + 1) % 2]);
  if (threadIdx.x == 0) {
    ptx::max_relaxed_gpu(&state.accounts[epoch % 2].begin_ns_inverted, ~ptx::now_ns());
    if (epoch > kLaunchesMax) shm::store_release(&state.local.stop, 1u);
  }
  // One thread's look counts: another block may fail meanwhile.
  const int seen = __syncthreads_or(threadIdx.x == 0 && (stop != 0 || epoch > kLaunchesMax));
  // A vote, so that the compiler knows that a warp's threads go on together.
  const bool stopped = __any_sync(0xffffffffu, seen) != 0;
  if (stopped) {
    if (threadIdx.x == 0) {
      // The poller may have begun before the launch failed: it waits for these groups, too.
      shm::fetch_add(&state.groups_done, kGroupsOfBlock);
      end_launch(params.launch, params.frame);
    }
    return;
  }
  ptx::may_dawdle();
  if constexpr (Op::kHelps) {
    if (blockIdx.x >= compute) {
      run_groups<Blocks::kOthers>(params, groups, shared.gate, epoch);
      // What the groups had in shared memory is the copy engine's now.
      ptx::fence_shared_to_async();
      epoch = shm::load_relaxed(&state.epoch) + 1;  // a register less across the roles
      if (may_help(params)) {
        prepare();
        __syncthreads();
      }
    }
  }
  if (blockIdx.x < compute || (Op::kHelps && may_help(params))) {
    if (threadIdx.x == 0) shared.gate.begin(epoch);
    __syncthreads();
    gemm_core<Config>(params.gemm, shared, static_cast<int>(blockIdx.x), static_cast<int>(compute));
    // Only when every math warp has the core's registers: an io warp that has nothing to do there
    // would take back what they still wait for. The block would stand still for ever.
    __syncthreads();
    if (threadIdx.x / 128 == Config::kMathWarpgroups) {
      ptx::registers_grow<kRoleRegisters>();
    } else {
      ptx::registers_shrink<kRoleRegisters>();
    }
    if (blockIdx.x < compute && Op::ends_with_tiles(params.launch)) {
      if (threadIdx.x == 0) {
        tiles_done(state, shared.gate.epoch(), shared.gate.totals);
        end_launch(params.launch, params.frame);
      }
      return;
    }
  }
  if constexpr (!Op::kHelps) {
    run_groups<Blocks::kAll>(params, groups, shared.gate, epoch);
  } else if (blockIdx.x < compute) {
    // From where the tiles had it: one register less across them.
    run_groups<Blocks::kCompute>(params, groups, shared.gate, shared.gate.epoch());
  } else if (threadIdx.x == 0 && may_help(params)) {
    note_tiles_done(state, shared.gate.epoch());
  }
  if (threadIdx.x == 0) end_launch(params.launch, params.frame);
}

template <class Op>
cudaError_t prepare_operator() {
  return cudaFuncSetAttribute(operator_kernel<Op>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(sizeof(OperatorShared<Op>)));
}

template <class Op>
cudaError_t launch_operator(const typename Op::Arguments& arguments, cudaStream_t stream) {
  const OperatorParams<Op> params = Op::params(arguments);
  const ThreadBlocks blocks = all_blocks(params.frame, params.launch.blocks);
  operator_kernel<Op>
      <<<blocks.count(), Op::Config::kThreads, sizeof(OperatorShared<Op>), stream>>>(params);
  return cudaGetLastError();
}

template <class Op>
inline constexpr OperatorKernel<typename Op::Arguments> kOperatorKernel = {
    .b_box = Op::Config::kBLayout == BLayout::kNK ? BBox{Op::Config::kBBox, kBlockK}
                                                  : BBox{kBlockK, Op::Config::kBBox},
    .prepare = prepare_operator<Op>,
    .launch = launch_operator<Op>,
};

}  // namespace mk::kernels::cuda
