/// \file
/// GEMM+AllReduce as one persistent kernel. Compute blocks reduce, too, when their tiles are
/// done, and then collect. Included by one .cu file per element type.
#pragma once

#include "kernels/cuda/core/finishing_epilogue.cuh"
#include "kernels/cuda/skeleton/operator_kernel.cuh"
#include "kernels/ops/gemm_ar/roles.h"
#include "kernels/ops/gemm_ar/sm90_policies.cuh"

namespace mk::kernels::cuda {

template <class ConfigType>
struct GemmArOp {
  using Config = ConfigType;
  using Order = GemmArTileScheduler;
  using Gate = GemmArGate;
  using Store = PackedStore<Config, GemmArMapped>;
  using Epilogue = FinishingEpilogue<Config, NumberedColumns, true>;
  using Launch = GemmArLaunch;
  using Arguments = GemmArArguments;
  template <class AnyExecutor>
  using Block = GemmArBlock<AnyExecutor>;
  using Executor = Leader;
  static constexpr Role kStreams = Role::kReduce;
  static constexpr bool kRounds = false;
  static constexpr bool kHelps = false;

  static __device__ bool stream(Group<GemmArOp>& group, std::uint32_t index) {
    return group.run(Role::kReduce, index, [&](Block<Executor>& block) {
      // Groups outside the compute blocks have time to check.
      if (!gemm_ar::begin_reduce(block, blockIdx.x >= group.launch.blocks.compute)) return false;
      return group.launch.accumulates_own_tiles() ||
             group.take_steps(
                 block, group.state.streams_taken, group.frame.steps.sums,
                 [](Block<Executor>& b, std::uint32_t position, Part part) {
                   return gemm_ar::reduce_chunk(b, position, part);
                 },
                 [] {});
    });
  }
  static __device__ bool send(Block<Executor>& block) { return gemm_ar::send(block); }
  static __device__ bool receive(Group<GemmArOp>& group, Block<Executor>& block) {
    if (!gemm_ar::begin_receive(block)) return false;
    return group.receive_steps(block, [](Block<Executor>& b, std::uint32_t position, Part part) {
      return gemm_ar::receive_step(b, position, part);
    });
  }

  static MK_HOST_DEVICE Warpgroups receiving_groups(const Launch& launch) {
    return cuda::receiving_groups(launch.blocks);
  }
  /// To collect, for other ranks' chunks, who may fail. (Its own come from groups that have
  /// waited.)
  static __device__ bool waits_after_receive(const Launch& launch) {
    return launch.context.world.locals > 1;
  }

  static __device__ bool ends_with_tiles(const Launch&) { return false; }
  static __device__ bool after_tiles(Group<GemmArOp>& group) {
    const World& world = group.launch.context.world;
    if (world.locals > 1 && !stream(group, group.compute_index())) return false;
    if (world.nodes > 1 && !group.join_receive()) return false;
    // Every group collects.
    const Warpgroups collectors = warpgroups_of(group.launch.blocks.compute);
    return group.run(Role::kCollect, group.compute_index(), [&](Block<Executor>& block) {
      return gemm_ar::collect(block, collectors, false);
    });
  }

  static OperatorParams<GemmArOp> params(const GemmArArguments& arguments) {
    const GemmArLaunch& launch = arguments.launch;
    const World& world = launch.context.world;
    const GemmArSchedule& schedule = launch.schedule;
    OperatorParams<GemmArOp> params = make_params<GemmArOp>(
        arguments, schedule.tiles(), Order::Params::of(launch),
        Gate::Params::of(launch, arguments.product.k_blocks), Store::params(schedule, arguments));
    params.gemm.epilogue.tiles = {arguments.numbered, launch.blocks.compute};
    const std::uint32_t chunks = schedule.chunks(world.local);
    const std::uint32_t per_chunk = schedule.tiles_per_chunk();
    params.frame.steps = {
        sum_steps(chunks, per_chunk, world.nodes > 1 ? chunks : 0, launch.blocks.reduce),
        arrival_steps(schedule.receive_steps(world.local), per_chunk, receiving_groups(launch))};
    return params;
  }
};

}  // namespace mk::kernels::cuda
