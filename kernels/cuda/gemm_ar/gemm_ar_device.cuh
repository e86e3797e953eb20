/// \file
/// GEMM + AllReduce as one persistent kernel. Blocks 0 .. compute - 1 run the GEMM core, and when
/// their tiles are done they reduce, too, and then collect; the others reduce all along. All blocks
/// of all ranks are resident at the same time, or the waits end at their deadlines. Included by one
/// .cu file per element type.
#pragma once

#include <new>

#include "kernels/cuda/gemm_ar/executor.cuh"
#include "kernels/cuda/gemm_ar/policies.cuh"
#include "kernels/cuda/gemm_launch.cuh"
#include "kernels/gemm_ar/roles.h"

namespace mk::kernels::cuda {

template <class Config>
struct GemmArParams {
  GemmParams<ScheduleOrder, AlwaysReady, OwnerStore<Config>> gemm;
  GemmArLaunch launch;  ///< without the epoch
  GemmArDeviceState* state;
  GemmArHostReport* report;
  void* c;
  std::uint64_t ldc;
};

/// Registers of a thread outside the core: an equal share of what the block is given at its start.
inline constexpr int kRoleRegisters = 168;

/// Chunks in the order of their numbers, each to the first group that has nothing else to do: those
/// of the reduce blocks while tiles are computed, all of them afterwards.
__device__ inline bool reduce(GemmArBlock<Leader>& block, std::uint32_t* chunks_taken) {
  if (!gemm_ar::begin_reduce(block)) return false;
  const ::cuda::atomic_ref<std::uint32_t, ::cuda::thread_scope_device> taken(*chunks_taken);
  const std::uint32_t chunks = block.schedule.chunks(block.world.local);
  for (;;) {
    const std::uint32_t chunk = taken.fetch_add(1, ::cuda::memory_order_relaxed);
    if (chunk >= chunks) return true;
    if (!gemm_ar::reduce_chunk(block, chunk)) return false;
  }
}

/// The leader's part: sums, and on a compute block, whose tiles are stored by now, then the
/// collect role.
template <class Config>
__device__ __forceinline__ void lead(const GemmArParams<Config>& params, RoleShared& shared,
                                     std::uint32_t group, std::uint32_t epoch,
                                     GemmArBlockReport& report) {
  constexpr std::uint32_t kGroups = Config::kThreads / kGroupThreads;
  using Block = GemmArBlock<Leader>;
  static_assert(sizeof(Block) <= sizeof shared.block);
  auto& launch = *reinterpret_cast<GemmArLaunch*>(shared.launch);
  const bool computes = blockIdx.x < launch.blocks.compute;
  launch.epoch = epoch;
  Leader leader(shared, params.c, params.ldc);
  if (computes && group == 0) {
    report.tiles_end_ns = ptx::now_ns();
    // The storing warps have waited for their stores, and then the block for them.
    leader.release_fence();
    shm::store_relaxed(&launch.local->done_by(Role::kCompute)[blockIdx.x], epoch);
  }
  BlockTotals totals;
  bool completed = true;
  if (launch.context.world.locals > 1) {
    const std::uint32_t index = blockIdx.x * kGroups + group;
    auto& block = *new (shared.block) Block(leader, launch, Role::kReduce, index, totals);
    if (blockIdx.x == launch.blocks.compute && group == 0) announce_launch(launch);
    completed = reduce(block, &params.state->chunks_taken);
    if (group == 0) {
      report.sums_end_ns = ptx::now_ns();
      report.reduce_waits = totals.waits;
    }
  }
  if (computes && completed) {
    // Every group collects.
    const std::uint32_t index = blockIdx.x * kGroups + group;
    launch.blocks.compute *= kGroups;
    totals = BlockTotals{};
    auto& block = *new (shared.block) Block(leader, launch, Role::kCollect, index, totals);
    gemm_ar::collect(block);
    if (group == 0) report.collect_waits = totals.waits;
  }
  leader.finish();
}

/// Everything but the tiles, by all threads of a block.
template <class Config>
__device__ __forceinline__ void run_roles(const GemmArParams<Config>& params, RoleShared* groups,
                                          std::uint32_t epoch, GemmArBlockReport& report) {
  const std::uint32_t group = threadIdx.x / kGroupThreads;
  const std::uint32_t thread = threadIdx.x % kGroupThreads;
  RoleShared& shared = groups[group];
  static_assert(sizeof(GemmArLaunch) % 8 == 0);
  const auto* from = reinterpret_cast<const std::uint64_t*>(&params.launch);
  auto* to = reinterpret_cast<std::uint64_t*>(shared.launch);
  for (std::uint32_t i = thread; i < sizeof(GemmArLaunch) / 8; i += kGroupThreads) to[i] = from[i];
  if (thread == 0) {
    for (std::uint32_t slot = 0; slot < RoleShared::kJobs; ++slot) {
      ptx::mbarrier_init(&shared.posted[slot], 1);
      ptx::mbarrier_init(&shared.done[slot], kWorkers / 32);
    }
  }
  __syncthreads();
  if (thread >= 32) {
    work<typename Config::Element>(shared, thread - 32, kWorkers);
  } else {
    if (thread == 0) lead(params, shared, group, epoch, report);
    __syncwarp();
  }
  __syncthreads();
}

/// The last block of a launch: tells a failure to the local ranks and to the host, and advances the
/// epoch.
__device__ inline void end_launch(const GemmArLaunch& launch, GemmArDeviceState& state,
                                  GemmArHostReport* report, std::uint32_t epoch) {
  if (shm::fetch_add(&state.blocks_done, 1u) + 1 != gridDim.x) return;
  shm::store_relaxed(&state.blocks_done, 0u);
  shm::store_relaxed(&state.chunks_taken, 0u);
  if (shm::load_acquire(&state.local.stop) != 0 && report->failed == GemmArHostReport::kNone) {
    report->epoch = epoch;
    report->record = state.local.failure;
    announce_failure(launch.context);
    const std::byte* own = launch.context.workspaces[launch.context.world.local];
    report->peer_failed =
        shm::load_acquire(reinterpret_cast<const std::uint32_t*>(own + WorkspaceHead::failed()));
    const bool spent = state.local.failure.claimed == 0;
    shm::store_release(&report->failed, spent ? std::uint32_t{GemmArHostReport::kLaunchesSpent}
                                              : std::uint32_t{GemmArHostReport::kWait});
  }
  shm::store_release(&state.epoch, epoch);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    gemm_ar_kernel(const __grid_constant__ GemmArParams<Config> params) {
  extern __shared__ __align__(1024) std::uint8_t dynamic_shared[];
  auto* groups = reinterpret_cast<RoleShared*>(dynamic_shared);
  using Store = OwnerStore<Config>;
  static_assert(
      sizeof(RoleShared) * (Config::kThreads / kGroupThreads) <= Config::kStages * Config::kABytes,
      "it lies where the core's stages were, its barriers elsewhere");
  constexpr std::uint32_t kLaunchesMax = 0x7fffffffu;

  GemmArDeviceState& state = *params.state;
  const std::uint32_t epoch = shm::load_relaxed(&state.epoch) + 1;
  GemmArBlockReport& report = state.reports[blockIdx.x];
  if (threadIdx.x == 0) {
    report.begin_ns = ptx::now_ns();
    if (epoch > kLaunchesMax) shm::store_release(&state.local.stop, 1u);
  }
  const bool stopped =
      __syncthreads_or(threadIdx.x == 0 && shm::load_acquire(&state.local.stop) != 0) != 0;
  const std::uint32_t compute_blocks = params.launch.blocks.compute;
  if (!stopped) {
    if (blockIdx.x < compute_blocks) {
      auto& shared = *reinterpret_cast<GemmShared<Config, Store::kSharedWords>*>(dynamic_shared);
      gemm_core<Config>(params.gemm, shared, static_cast<int>(blockIdx.x),
                        static_cast<int>(compute_blocks));
      if (threadIdx.x / 128 == Config::kMathWarpgroups) {
        ptx::registers_grow<kRoleRegisters>();
      } else {
        ptx::registers_shrink<kRoleRegisters>();
      }
      __syncthreads();
    }
    run_roles(params, groups, epoch, report);
  }
  if (threadIdx.x == 0) {
    report.end_ns = ptx::now_ns();
    end_launch(params.launch, state, params.report, epoch);
  }
}

template <class Config>
cudaError_t prepare_gemm_ar() {
  return cudaFuncSetAttribute(
      gemm_ar_kernel<Config>, cudaFuncAttributeMaxDynamicSharedMemorySize,
      static_cast<int>(kGemmSharedBytes<Config, OwnerStore<Config>::kSharedWords>));
}

template <class Config>
cudaError_t launch_gemm_ar(const GemmArArguments& arguments, unsigned blocks, cudaStream_t stream) {
  const GemmArLaunch& launch = arguments.launch;
  const World& world = launch.context.world;
  const GemmArSchedule schedule(launch.plan, launch.m);
  GemmArParams<Config> params{.gemm = {.a = arguments.a,
                                       .b = arguments.b,
                                       .a_box_rows = arguments.a_box_rows,
                                       .m_blocks = static_cast<int>(schedule.tiles()),
                                       .k_blocks = arguments.k_blocks,
                                       .order = {schedule, world.local},
                                       .gate = {},
                                       .store = {schedule,
                                                 world.locals,
                                                 world.local,
                                                 arguments.out,
                                                 {},
                                                 {},
                                                 &arguments.state->epoch}},
                              .launch = launch,
                              .state = arguments.state,
                              .report = arguments.report,
                              .c = arguments.c,
                              .ldc = arguments.ldc};
  for (std::uint32_t local = 0; local < world.locals; ++local) {
    params.gemm.store.slots[local] = arguments.slots[local];
    params.gemm.store.workspaces[local] = launch.context.workspaces[local];
  }
  gemm_ar_kernel<Config>
      <<<blocks, Config::kThreads, kGemmSharedBytes<Config, OwnerStore<Config>::kSharedWords>,
         stream>>>(params);
  return cudaGetLastError();
}

template <class Config>
inline constexpr GemmArKernel kGemmArKernel = {
    .block_m = Config::kBlockM,
    .block_n = Config::kBlockN,
    .b_box_rows = Config::kBLayout == BLayout::kNK ? Config::kBBox : kBlockK,
    .b_box_columns = Config::kBLayout == BLayout::kNK ? kBlockK : Config::kBBox,
    .prepare = prepare_gemm_ar<Config>,
    .launch = launch_gemm_ar<Config>,
};

template <class Element, BLayout kB>
const GemmArKernel& gemm_ar_kernel_for(std::uint32_t columns) {
  return columns <= 128 ? kGemmArKernel<GemmConfig<Element, kB, 128, 128, 6, 1>>
                        : kGemmArKernel<GemmConfig<Element, kB, 128, 256, 4, 1>>;
}

}  // namespace mk::kernels::cuda
