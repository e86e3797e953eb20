/// \file
/// AllGather + GEMM as one persistent kernel: the gather's roles beside the product. Included by
/// one .cu file per element type.
#pragma once

#include "kernels/ag_gemm/roles.h"
#include "kernels/cuda/ag_gemm/ag_gemm_seams.cuh"
#include "kernels/cuda/copy_warp.cuh"
#include "kernels/cuda/operator_kernel.cuh"

namespace mk::kernels::cuda {

template <class ConfigType>
struct AgGemmOp {
  using Config = ConfigType;
  using Order = AgGemmOrder;
  using Gate = AgGemmGate;
  using Store = AgGemmStore<Config>;
  using Launch = AgGemmLaunch;
  using Arguments = AgGemmArguments;
  template <class AnyExecutor>
  using Block = AgGemmBlock<AnyExecutor>;
  using Executor = CopyLeader;
  static constexpr Role kStreams = Role::kShare;
  static constexpr bool kHelps = true;

  static __device__ bool stream(Group<AgGemmOp>& group, std::uint32_t index, bool goes_on = false) {
    const auto role = [](Block<Executor>& block) {
      if (!ag_gemm::share(block)) return false;
      return block.index != 0 || !ends_with_tiles(block.launch) || ag_gemm::await_headers(block);
    };
    return group.run(Role::kShare, index, role, goes_on);
  }
  /// Shares rows like the groups that do.
  static __device__ __forceinline__ void beside(const OperatorParams<AgGemmOp>& params,
                                                const typename Gate::Shared& gate) {
    const std::uint32_t sharers = params.frame.spare_sharers;
    if (blockIdx.x >= sharers) return;
    ptx::may_dawdle();
    const AgGemmLaunch& launch = gate.launch();
    CopyWarp warp(*params.frame.state);
    BlockTotals totals;
    // In memory, not in an io thread's few registers: else ptxas spills, in some versions of the
    // core.
    alignas(Block<CopyWarp>) unsigned char bytes[sizeof(Block<CopyWarp>)];
    unsigned char* place = bytes;
    asm("" : "+l"(place));
    auto& block = *new (place) Block<CopyWarp>(warp, launch, Role::kShare,
                                               launch.blocks.share - sharers + blockIdx.x, totals);
    // As ag_gemm::share on one node: all that there is of it has to fit into those registers.
    gather::share(block.gather, launch.shard, launch.in_turn, {launch.sharing.parts, 0});
    if (threadIdx.x % 32 == 0) account_for(*params.frame.state, launch.epoch, Role::kShare, totals);
  }
  static __device__ bool send(Block<Executor>& block) { return ag_gemm::send(block); }
  static __device__ bool receive(Group<AgGemmOp>& /*group*/, Block<Executor>& block) {
    return ag_gemm::receive(block);
  }

  /// Where nobody waits for the end of their reading, and nobody wants the whole A.
  static MK_HOST_DEVICE bool ends_with_tiles(const Launch& launch) {
    return launch.gathered == nullptr && !launch.schedule.gather().awaits_consumers();
  }
  static __device__ bool after_tiles(Group<AgGemmOp>& group) {
    if (threadIdx.x / kGroupThreads != 0) return true;
    return group.run(Role::kCollect, blockIdx.x,
                     [](Block<Executor>& block) { return ag_gemm::collect(block); });
  }

  static OperatorParams<AgGemmOp> params(const AgGemmArguments& arguments) {
    const AgGemmLaunch& launch = arguments.launch;
    const World& world = launch.context.world;
    const AgGemmSchedule& schedule = launch.schedule;
    const AgGemmTiles tiles{schedule, Divisor(schedule.rounds()), schedule.tiles()};
    const AgGemmBands bands = AgGemmBands::of(schedule, launch.in_turn, launch.blocks.compute);
    return make_params<AgGemmOp>(
        arguments, tiles.tiles,
        {tiles, bands, launch.blocks.compute, &arguments.frame.state->tiles_taken},
        {tiles, world, launch.mode == Mode::kUnfused, arguments.gathered,
         waits_done<AgGemmOp>(arguments), &arguments.frame.state->tiles_taken},
        {tiles, arguments.c_tile, arguments.c_eight, static_cast<std::byte*>(arguments.c),
         arguments.ldc * kElementBytes, launch.plan.max.n});
  }
};

}  // namespace mk::kernels::cuda
