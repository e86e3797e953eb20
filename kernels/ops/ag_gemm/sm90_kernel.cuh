/// \file
/// AllGather+GEMM as one persistent kernel: the gather's roles beside the product. Included by
/// one .cu file per element type.
#pragma once

#include "kernels/cuda/core/finishing_epilogue.cuh"
#include "kernels/cuda/core/tile_limits.h"
#include "kernels/cuda/skeleton/operator_kernel.cuh"
#include "kernels/ops/ag_gemm/roles.h"
#include "kernels/ops/ag_gemm/sm90_policies.cuh"

namespace mk::kernels::cuda {

template <class ConfigType>
struct AgGemmOp {
  using Config = ConfigType;
  using Order = AgGemmTakenTiles;
  using Gate = AgGemmGate;
  using Store = AgGemmStore<Config>;
  using Epilogue = FinishingEpilogue<Config, TileColumns, false>;
  using Launch = AgGemmLaunch;
  using Arguments = AgGemmArguments;
  template <class AnyExecutor>
  using Block = AgGemmBlock<AnyExecutor>;
  using Executor = CopyLeader;
  static constexpr Role kStreams = Role::kShare;
  static constexpr bool kHelps = true;

  static __device__ bool stream(Group<AgGemmOp>& group, std::uint32_t index, bool goes_on = false) {
    // The others wait for what a group passes on: that comes before what this one waits for.
    const auto role = [&](Block<Executor>& block) {
      return ag_gemm::share(block) && (goes_on || ends(block));
    };
    return group.run(Role::kShare, index, role, goes_on);
  }
  static __device__ bool send(Block<Executor>& block) { return ag_gemm::send(block); }
  static __device__ bool receive(Group<AgGemmOp>& group, Block<Executor>& block) {
    if (!ag_gemm::receive(block)) return false;
    return groups_that_only_share(group.frame, group.launch.blocks) != 0 || ends(block);
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

  /// Where there are many tiles, blocks that begin a band at one time read the same part of B at
  /// one time until its end, and find it in L2.
  static bool waits_for_bands(const AgGemmSchedule& schedule, Arrival arrival) {
    return schedule.tiles() > kFewTiles && arrival == Arrival::kSideBySide;
  }

  static constexpr std::uint32_t kStageRowBytes = kBlockK * kElementBytes;

  /// Of a group that shares, or, where all those receive, that has received: what `collect` does
  /// elsewhere, one of them does here.
  static __device__ bool ends(Block<Executor>& block) {
    return block.index != 0 || !ends_with_tiles(block.launch) || ag_gemm::await_headers(block);
  }

  static OperatorParams<AgGemmOp> params(const AgGemmArguments& arguments) {
    const AgGemmLaunch& launch = arguments.launch;
    const World& world = launch.context.world;
    const AgGemmSchedule& schedule = launch.schedule;
    AgGemmOrder order = AgGemmOrder::of(launch);
    order.in_bands = waits_for_bands(schedule, launch.arrival);
    std::uint32_t* const taken = &arguments.frame.state->tiles_taken;
    OperatorParams<AgGemmOp> params = make_params<AgGemmOp>(
        arguments, order.tiles.tiles, {order, launch.blocks.compute, taken},
        {{order, launch.mode == Mode::kUnfused},
         world,
         arguments.gathered,
         waits_done<AgGemmOp>(arguments),
         taken,
         schedule.spans() ? schedule.span_step() * kStageRowBytes : 0},
        {order.tiles, arguments.c_tile, arguments.c_eight, static_cast<std::byte*>(arguments.c),
         arguments.ldc * kElementBytes, launch.plan.epilogue, launch.plan.result_columns()});
    params.gemm.epilogue.tiles = {schedule.large_grid().tile_cols()};
    return params;
  }
};

}  // namespace mk::kernels::cuda
