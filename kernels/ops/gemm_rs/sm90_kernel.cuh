/// \file
/// GEMM+ReduceScatter as one persistent kernel. Compute blocks reduce, too, when their tiles are
/// done. Included by one .cu file per element type.
#pragma once

#include "kernels/cuda/core/finishing_epilogue.cuh"
#include "kernels/cuda/skeleton/operator_kernel.cuh"
#include "kernels/ops/gemm_rs/roles.h"
#include "kernels/ops/gemm_rs/sm90_policies.cuh"

namespace mk::kernels::cuda {

template <class ConfigType>
struct GemmRsOp {
  using Config = ConfigType;
  using Order = GemmRsTileScheduler;
  using Gate = GemmRsGate;
  using Store = PackedStore<Config, GemmRsMapped>;
  using Epilogue = FinishingEpilogue<Config, NumberedColumns, true>;
  using Launch = GemmRsLaunch;
  using Arguments = GemmRsArguments;
  template <class AnyExecutor>
  using Block = GemmRsBlock<AnyExecutor>;
  using Executor = Leader;
  static constexpr Role kStreams = Role::kReduce;
  static constexpr bool kRounds = true;
  static constexpr bool kHelps = false;

  static __device__ bool stream(Group<GemmRsOp>& group, std::uint32_t index) {
    // Groups outside the compute blocks have time to check, and, where nothing is summed to be
    // kept, to join those that receive.
    const bool outside = blockIdx.x >= group.launch.blocks.compute;
    const bool receives = outside && group.launch.sums_shard_once();
    const auto role = [&](Block<Executor>& block) {
      if (!gemm_rs::begin_reduce(block, outside)) return false;
      return group.launch.accumulates_own_tiles() ||
             group.take_steps(
                 block, group.state.streams_taken, group.frame.steps.sums,
                 [](Block<Executor>& b, std::uint32_t piece, Part part) {
                   return gemm_rs::reduce_piece(b, piece, part);
                 },
                 [] {});
    };
    if (!group.run(Role::kReduce, index, role, receives)) return false;
    return !receives || group.join_receive();
  }
  static __device__ bool send(Block<Executor>& block) { return gemm_rs::send(block); }
  static __device__ bool receive(Group<GemmRsOp>& group, Block<Executor>& block) {
    if (!block.await_turn()) return false;
    return group.receive_steps(block, [](Block<Executor>& b, std::uint32_t chunk, Part part) {
      return gemm_rs::receive_chunk(b, chunk, part);
    });
  }

  static MK_HOST_DEVICE Warpgroups receiving_groups(const Launch& launch) {
    const Warpgroups others =
        launch.sums_shard_once() ? warpgroups_of(launch.blocks.reduce) : Warpgroups(0);
    return cuda::receiving_groups(launch.blocks) + others;
  }
  static __device__ bool waits_after_receive(const Launch&) { return false; }

  static MK_HOST_DEVICE bool ends_with_tiles(const Launch& launch) {
    return launch.accumulates_own_tiles() || launch.context.world.size() == 1;
  }
  static __device__ bool after_tiles(Group<GemmRsOp>& group) {
    const World& world = group.launch.context.world;
    if (world.locals > 1 && !stream(group, group.compute_index())) return false;
    return world.nodes == 1 || group.join_receive();
  }

  static OperatorParams<GemmRsOp> params(const GemmRsArguments& arguments) {
    const GemmRsLaunch& launch = arguments.launch;
    const World& world = launch.context.world;
    const GemmRsSchedule& schedule = launch.schedule;
    OperatorParams<GemmRsOp> params =
        make_params<GemmRsOp>(arguments, schedule.tiles(), Order::Params::of(launch),
                              {Gate::Base::Params::of(launch, arguments.product.k_blocks),
                               waits_done<GemmRsOp>(arguments)},
                              Store::params(schedule, arguments));
    params.gemm.epilogue.tiles = {arguments.numbered, launch.blocks.compute};
    const std::uint32_t onward =
        world.nodes > 1 ? schedule.pieces_sent(world.node, world.local) : 0;
    // Shards' chunks may differ in their tiles; parts are of any number of them.
    const PackedTiles own = schedule.packed(world.rank());
    const std::uint32_t per_chunk = own.tiles_per_chunk();
    SumSteps& steps = params.frame.steps;
    steps.sums = sum_steps(launch.pieces_reduced(), per_chunk, onward, launch.blocks.reduce);
    // Tiles that come all along are summed as such, even if what came over the network is, too.
    steps.arrivals = launch.sums_shard_once()
                         ? sum_steps(own.chunks(), per_chunk, 0, launch.blocks.reduce)
                         : arrival_steps(own.chunks(), per_chunk, receiving_groups(launch));
    return params;
  }
};

}  // namespace mk::kernels::cuda
