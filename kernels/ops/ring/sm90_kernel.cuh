/// \file
/// Ring Attention as one persistent kernel: the gather's roles beside the attention core. Included
/// by one .cu file per element type.
#pragma once

#include <algorithm>
#include <cstddef>

#include "kernels/cuda/core/attention_core.cuh"
#include "kernels/cuda/skeleton/operator_kernel.cuh"
#include "kernels/ops/ring/packed_tables.cuh"
#include "kernels/ops/ring/roles.h"
#include "kernels/ops/ring/sm90_arguments.h"
#include "kernels/ops/ring/sm90_policies.cuh"

namespace mk::kernels::cuda {

/// Sequences of one length in a launch, or packed ones.
enum class RingSequences { kAlike, kPacked };

template <class Config, RingSequences kOf>
struct RingParams;
template <class Config>
struct RingParams<Config, RingSequences::kAlike> {
  using Type = AttentionParams<RingItems, RingKeys<RingRanges>, RingGate,
                               StoreRows<typename Config::Element>>;
};
template <class Config>
struct RingParams<Config, RingSequences::kPacked> {
  using Type = AttentionParams<PackedItems, RingKeys<PackedRanges>, RingGate,
                               StoreRows<typename Config::Element>>;
};

template <class ConfigType, RingSequences kOf>
struct RingAttentionOp;

/// The kernel's parameters, as group.cuh reads them.
template <class Config, RingSequences kOf>
struct OperatorParams<RingAttentionOp<Config, kOf>> {
  typename RingParams<Config, kOf>::Type attention;
  RingAttentionLaunch launch;  ///< without the epoch
  FrameArguments frame;
  std::uint64_t* shown = nullptr;  ///< RingAttentionArguments
  PackedRowMaps rows;
  std::uint32_t watchers = 0;
  void* c = nullptr;  ///< no role asks for it
  std::uint64_t ldc = 0;
};

/// What operator_kernel.cuh says of an operator, for the blocks that compute nothing.
template <class ConfigType, RingSequences kOf>
struct RingAttentionOp {
  using Config = ConfigType;
  static constexpr bool kPacked = kOf == RingSequences::kPacked;
  using Gate = RingGate;
  using Launch = RingAttentionLaunch;
  using Params = OperatorParams<RingAttentionOp>;
  template <class AnyExecutor>
  using Block = RingAttentionBlock<AnyExecutor>;
  using Executor = RingLeader;
  static constexpr Role kStreams = Role::kShare;
  static constexpr bool kRounds = false;
  static constexpr bool kHelps = false;

  /// The first groups watch, the others share.
  static __device__ bool stream(Group<RingAttentionOp>& group, std::uint32_t index,
                                bool goes_on = false) {
    const std::uint32_t watchers = group.params().watchers;
    if (index < watchers) {
      return group.run(Role::kCollect, index, [&group, index](Block<Executor>& block) {
        block.executor.begin(group.params().shown, block.epoch, group.params().attention.gate.trace,
                             gridDim.x + index);
        return ring_attention::watch(block);
      });
    }
    group.launch.blocks.share -= watchers;
    return group.run(
        Role::kShare, index - watchers,
        [&group](Block<Executor>& block) {
          const MappedKeys<!kPacked> keys{block.launch.keys_values, group.params().rows,
                                          block.executor};
          return ring_attention::share(block, keys, !kPacked && block.launch.by_dma);
        },
        goes_on);
  }
  static __device__ bool send(Block<Executor>& block) { return ring_attention::send(block); }
  static __device__ bool receive(Group<RingAttentionOp>&, Block<Executor>& block) {
    return ring_attention::receive(block);
  }
  /// Blocks that compute end with their items.
  static __device__ bool after_tiles(Group<RingAttentionOp>&) { return true; }
};

/// Shared memory of a block that computes.
template <class Config>
struct RingAttentionShared {
  AttentionShared<Config> core;
  RingGate::Shared gate;  ///< where gate_shared looks for it
};

/// Of any block: those outside the compute blocks have their groups there, and the poller's words.
template <class Op>
constexpr std::size_t ring_attention_shared_bytes() {
  constexpr std::size_t kGroups = sizeof(GroupShared<Op>) * kGroupsOfBlock + kPolledFlagsMax * 4;
  constexpr std::size_t kBytes =
      std::max(kGroups, sizeof(RingAttentionShared<typename Op::Config>));
  static_assert(kBytes <= 227 * 1024, "what a block may have");
  return kBytes;
}

/// By a group's leader, of packed sequences: what the host did not know of the launch.
template <class Op>
__device__ __forceinline__ void complete_launch(const typename Op::Params& params,
                                                GroupShared<Op>& group) {
  auto& launch = *reinterpret_cast<typename Op::Launch*>(group.launch);
  const PackedTotals& totals = *params.attention.items.totals;
  launch.m = totals.digest;
  launch.keys_values.sequence = totals.rows;
  launch.keys_values.rows = launch.plan.gathered_rows(totals.rows);
}

/// By all threads of a block outside the compute blocks. Of a larger block the threads beyond its
/// groups only stand at the barrier.
template <class Op>
__device__ __forceinline__ void run_ring_groups(const typename Op::Params& params,
                                                GroupShared<Op>* groups,
                                                const RingGate::Shared& gate, std::uint32_t epoch) {
  if constexpr (Op::Config::kThreads > kGroupsOfBlock * kGroupThreads) {
    if (threadIdx.x >= kGroupsOfBlock * kGroupThreads) {
      __syncthreads();
      return;
    }
  }
  if constexpr (Op::kPacked) {
    if (threadIdx.x % kGroupThreads == 0)
      complete_launch<Op>(params, groups[threadIdx.x / kGroupThreads]);
  }
  run_groups<Blocks::kOthers>(params, groups, gate, epoch);
}

/// By all threads of a block that is to compute.
template <class Op>
__device__ __forceinline__ void prepare_tiles(const typename Op::Params& params,
                                              RingAttentionShared<typename Op::Config>& shared) {
  prepare_attention<typename Op::Config>(params.attention, shared.core);
  if (threadIdx.x < RingRuns::kMax) shared.gate.seen[threadIdx.x] = 0;
}

template <class Op>
__global__ void __launch_bounds__(Op::Config::kThreads, 1)
    ring_attention_kernel(const __grid_constant__ OperatorParams<Op> params) {
  using Config = typename Op::Config;
  using Shared = RingAttentionShared<Config>;
  extern __shared__ __align__(1024) std::uint8_t dynamic_shared[];
  constexpr std::uint32_t kGroupsThreads = kGroupsOfBlock * kGroupThreads;
  static_assert(Config::kThreads >= kGroupsThreads);
  static_assert(offsetof(Shared, gate) == sizeof(AttentionShared<Config>));
  constexpr std::uint32_t kLaunchesMax = 0x7fffffffu;
  auto& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  auto* const groups = reinterpret_cast<GroupShared<Op>*>(dynamic_shared);

  DeviceState& state = *params.frame.state;
  const std::uint32_t stop = shm::load_relaxed(&state.local.stop);
  const std::uint32_t epoch = shm::load_relaxed(&state.epoch) + 1;
  const std::uint32_t compute = params.launch.blocks.compute;
  if (blockIdx.x < compute) {
    prepare_tiles<Op>(params, shared);
  } else if (threadIdx.x < kGroupsThreads) {
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
  bool computes = true;
  if (blockIdx.x >= compute) {
    run_ring_groups<Op>(params, groups, shared.gate, epoch);
    computes = blockIdx.x >= late_blocks_begin(params.frame, params.launch);
    if (computes) {
      // The groups' shared memory is the copy engine's now.
      ptx::fence_shared_to_async();
      prepare_tiles<Op>(params, shared);
    }
  }
  // A vote again: else the products' loops would not have uniform registers.
  if (!__any_sync(0xffffffffu, computes)) {
    if (threadIdx.x == 0) end_launch(params.launch, params.frame);
    return;
  }
  // Anew: kept from the beginning it would be one register more.
  if (threadIdx.x == 0) shared.gate.begin(params.launch, shm::load_relaxed(&state.epoch) + 1);
  __syncthreads();
  attention_core<Config>(params.attention, shared.core, static_cast<int>(blockIdx.x),
                         static_cast<int>(compute));
  __syncthreads();
  if (threadIdx.x == 0) {
    RingGate::end_trace(params.attention.gate.trace, shared.gate);
    if (blockIdx.x < compute) {
      tiles_done(state, shared.gate.epoch, shared.gate.totals);
      // The poller need not stay for this block.
      if (params.frame.pollers != 0) ptx::add_release_gpu(&state.groups_done, kGroupsOfBlock);
    } else {
      account_for(state, shared.gate.epoch, Role::kCompute, shared.gate.totals);
    }
    end_launch(params.launch, params.frame);
  }
}

/// Makes a packed launch's tables; the launch's kernel follows it on the stream.
template <class Config>
__global__ void __launch_bounds__(PackedTableMaker::kThreads)
    make_packed_tables(const __grid_constant__ PackedTableArguments arguments) {
  PackedTableMaker(arguments).run();
}

template <class Op>
cudaError_t prepare_ring_attention() {
  if constexpr (Op::kPacked) {
    // Loads it, which CUDA would else do at its first launch, and wait for running kernels.
    cudaFuncAttributes attributes;
    const cudaError_t error =
        cudaFuncGetAttributes(&attributes, make_packed_tables<typename Op::Config>);
    if (error != cudaSuccess) return error;
  }
  return cudaFuncSetAttribute(ring_attention_kernel<Op>,
                              cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(ring_attention_shared_bytes<Op>()));
}

template <class Op>
cudaError_t launch_ring_attention(const RingAttentionArguments& arguments, cudaStream_t stream) {
  using Config = typename Op::Config;
  using Element = typename Config::Element;
  OperatorParams<Op> params{};
  auto& attention = params.attention;
  attention.q = arguments.q;
  attention.scale_log2 = arguments.scale_log2;
  attention.dealer.words = arguments.dealer_words;
  attention.dealer.late = static_cast<int>(late_blocks(arguments));
  if constexpr (Op::kPacked) {
    PackedTableArguments make = arguments.packed.make;
    make.tile_rows = Config::kTileQueries;
    if (!arguments.packed.there)
      make_packed_tables<Config><<<1, PackedTableMaker::kThreads, 0, stream>>>(make);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
    attention.items = arguments.packed.items;
    attention.keys.ranges = arguments.packed.ranges;
  } else {
    attention.items = arguments.items.items;
    attention.keys.ranges = arguments.items.ranges;
  }
  attention.keys.k = arguments.k;
  attention.keys.v = arguments.v;
  attention.keys.gathered = arguments.gathered;
  attention.keys.epoch = &arguments.frame.state->epoch;
  attention.keys.banks = arguments.launch.banks;
  attention.gate.shown = arguments.shown;
  attention.gate.local = &arguments.frame.state->local;
  attention.gate.tile_queries = Config::kTileQueries;
  attention.gate.pairs = static_cast<int>(arguments.launch.plan.head_pairs());
  attention.gate.all_first = arguments.launch.mode == Mode::kUnfused;
  attention.gate.trace = arguments.trace;
  params.shown = arguments.shown;
  params.rows = arguments.rows;
  params.watchers = arguments.watchers;
  attention.store.o = static_cast<Element*>(arguments.o.data);
  attention.store.batch_stride = arguments.o.batch_stride;
  attention.store.head_stride = arguments.o.head_stride;
  attention.store.row_stride = arguments.o.row_stride;
  attention.store.lse = arguments.lse;
  attention.store.lse_batch_stride = arguments.lse_batch_stride;
  attention.store.lse_head_stride = arguments.lse_head_stride;
  attention.store.lse_row_stride = arguments.lse_row_stride;
  params.launch = arguments.launch;
  params.frame = arguments.frame;
  const ThreadBlocks blocks = all_blocks(params.frame, params.launch.blocks);
  ring_attention_kernel<Op>
      <<<blocks.count(), Config::kThreads, ring_attention_shared_bytes<Op>(), stream>>>(params);
  return cudaGetLastError();
}

template <class Config, RingSequences kOf>
inline constexpr RingAttentionKernel kRingAttentionRecord = {
    .tile_queries = Config::kTileQueries,
    .tile_keys = Config::kTileKeys,
    .query_box_rows = kAttentionRows,
    .prepare = prepare_ring_attention<RingAttentionOp<Config, kOf>>,
    .launch = launch_ring_attention<RingAttentionOp<Config, kOf>>,
};

template <class Element, RingSequences kOf>
const RingAttentionKernel* ring_attention_of(std::uint32_t head_dim) {
  if (head_dim == 64) return &kRingAttentionRecord<AttentionConfig<Element, 64, 192, 128, 2>, kOf>;
#if defined(MK_RING_ATTENTION_D64_ONLY)
  return nullptr;
#else
  return &kRingAttentionRecord<AttentionConfig<Element, 128, 128, 176, 2>, kOf>;
#endif
}

}  // namespace mk::kernels::cuda
