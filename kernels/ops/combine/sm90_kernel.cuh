/// \file
/// GEMM+Combine as one persistent kernel: the index, the sums and what crosses the network beside
/// the grouped product. Compute blocks add up, too, when their tiles are done. Included by one .cu
/// file per element type.
#pragma once

#include "kernels/cuda/skeleton/operator_kernel.cuh"
#include "kernels/ops/combine/protocol.h"
#include "kernels/ops/combine/sm90_leader.cuh"
#include "kernels/ops/combine/sm90_policies.cuh"
#include "kernels/ops/combine/sm90_rows.cuh"

namespace mk::kernels::cuda {

template <class Element, BLayout kB, CombinePartials kPartials>
struct CombineOp {
  using Config = CombineConfig<Element, kB, kPartials>;
  using Epilogue = RowWeights<kPartials>;
  using Order = CombineTiles;
  using Gate = CombineGate<Config>;
  using Store = SlotRows<Config, kPartials>;
  using Launch = CombineLaunch;
  using Arguments = CombineArguments;
  template <class AnyExecutor>
  using Block = CombineBlock<AnyExecutor>;
  using Executor = CombineLeader;
  static constexpr Role kStreams = Role::kReduce;
  static constexpr bool kRounds = false;
  static constexpr bool kHelps = false;

  /// Groups outside the compute blocks make the index, then sum what goes to other nodes, then what
  /// stays here.
  static __device__ bool stream(Group<CombineOp>& group, std::uint32_t index) {
    const Launch& launch = group.launch;
    if (index < launch.blocks.plan) {
      const auto plan = [](Block<Executor>& block) { return gemm_combine::plan(block); };
      if (!group.run(Role::kPlan, index, plan, true)) return false;
    }
    if (launch.context.world.nodes > 1) {
      const auto reduce = [](Block<Executor>& block) { return gemm_combine::reduce(block); };
      if (!group.run(Role::kReduce, index, reduce, true)) return false;
    }
    return finish_tokens(group, index);
  }
  static __device__ bool send(Block<Executor>& block) { return gemm_combine::send(block); }
  /// Nobody does nothing else.
  static __device__ bool receive(Group<CombineOp>&, Block<Executor>&) { return true; }
  static MK_HOST_DEVICE bool ends_with_tiles(const Launch&) { return false; }
  static __device__ bool after_tiles(Group<CombineOp>& group) {
    return finish_tokens(group, group.launch.blocks.reduce + group.compute_index());
  }

  static OperatorParams<CombineOp> params(const CombineArguments& arguments) {
    const CombineLaunch& launch = arguments.launch;
    const CombineLayout& layout = launch.plan.layout;
    const std::byte* const own = launch.context.workspaces[launch.context.world.local];
    DeviceState& state = *arguments.frame.state;
    OperatorParams<CombineOp> params = {
        .gemm = {.a = arguments.product.a,
                 .b = arguments.product.b,
                 .a_box_rows = arguments.product.a_box_rows,
                 .m_blocks = 0,
                 .k_blocks = arguments.product.k_blocks,
                 .order = {reinterpret_cast<const CombineWords*>(own + layout.words),
                           reinterpret_cast<const CombineTile*>(own + layout.tiles),
                           reinterpret_cast<const std::uint32_t*>(own + layout.order),
                           &state.local.stop, arguments.columns,
                           Divisor(CombineSchedule::kBand * arguments.columns), &state.tiles_taken},
                 .gate = {1, arguments.a_half},
                 .store = {arguments.columns, &state.local.stop},
                 .epilogue = {launch.rows}},
        .launch = launch,
        .frame = arguments.frame,
        .c = arguments.c};
    return params;
  }

 private:
  /// The receive role, with all groups but those that send.
  static __device__ bool finish_tokens(Group<CombineOp>& group, std::uint32_t index) {
    const RoleBlocks& blocks = group.launch.blocks;
    const Warpgroups workers = warpgroups_of(blocks.reduce) + warpgroups_of(blocks.compute);
    return group.run(Role::kReceive, index, [workers](Block<Executor>& block) {
      return gemm_combine::receive(block, workers);
    });
  }
};

/// A build of few kernels leaves out fp32 of all but bf16 as [H, I], and f16 of [I, H].
template <class Element>
const CombineKernel* combine_kernel(BLayout b_layout, CombinePartials partials) {
  const auto of_layout = [&]<BLayout kB>() -> const CombineKernel* {
    constexpr bool kIsBf16 = std::is_same_v<Element, __nv_bfloat16>;
#if defined(MK_COMBINE_FEW_KERNELS)
    constexpr bool kElements = kB == BLayout::kNK || kIsBf16;
    constexpr bool kF32 = kB == BLayout::kNK && kIsBf16;
#else
    constexpr bool kElements = true;
    constexpr bool kF32 = true;
#endif
    if constexpr (kElements) {
      if (partials == CombinePartials::kElement)
        return &kOperatorKernel<CombineOp<Element, kB, CombinePartials::kElement>>;
    }
    if constexpr (kF32) {
      if (partials == CombinePartials::kF32)
        return &kOperatorKernel<CombineOp<Element, kB, CombinePartials::kF32>>;
    }
    return nullptr;
  };
  return b_layout == BLayout::kNK ? of_layout.template operator()<BLayout::kNK>()
                                  : of_layout.template operator()<BLayout::kKN>();
}

}  // namespace mk::kernels::cuda
