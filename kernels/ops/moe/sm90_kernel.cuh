/// \file
/// MoE Dispatch+GEMM as one persistent kernel: the gathers' roles and the routing plan beside the
/// grouped product. Included by one .cu file per element type.
#pragma once

#include "kernels/cuda/skeleton/operator_kernel.cuh"
#include "kernels/ops/moe/roles.h"
#include "kernels/ops/moe/sm90_leader.cuh"
#include "kernels/ops/moe/sm90_policies.cuh"

namespace mk::kernels::cuda {

template <class ConfigType, class EpilogueType>
struct MoeDispatchOp {
  using Config = ConfigType;
  using Epilogue = EpilogueType;
  using Order = MoeTiles;
  using Gate = MoeGate<Config>;
  using Store = MoeStore<Config, Epilogue::kSumsPerOutput>;
  using Launch = MoeDispatchLaunch;
  using Arguments = MoeDispatchArguments;
  template <class AnyExecutor>
  using Block = MoeDispatchBlock<AnyExecutor>;
  using Executor = MoeLeader;
  static constexpr Role kStreams = Role::kShare;
  static constexpr bool kRounds = false;
  static constexpr bool kHelps = false;

  /// The first groups plan, the others share; then all pull. (A group that does both shares first:
  /// that waits for nothing of this launch.)
  static __device__ bool stream(Group<MoeDispatchOp>& group, std::uint32_t index,
                                bool goes_on = false) {
    RoleBlocks& blocks = group.launch.blocks;
    const std::uint32_t sharers = moe_sharers(blocks);
    const std::uint32_t first_sharer = blocks.pull - sharers;
    if (group.launch.context.world.size() > 1 && index >= first_sharer) {
      blocks.share = sharers;
      const auto share = [](Block<Executor>& block) { return moe_dispatch::share(block); };
      if (!group.run(Role::kShare, index - first_sharer, share, true)) return false;
    }
    if (index < blocks.plan) {
      const auto plan = [](Block<Executor>& block) { return moe_dispatch::plan(block); };
      if (!group.run(Role::kPlan, index, plan, true)) return false;
    }
    const auto pull = [](Block<Executor>& block) { return moe_dispatch::pull(block); };
    return group.run(Role::kPull, index, pull, goes_on);
  }
  static __device__ bool send(Block<Executor>& block) { return moe_dispatch::send(block); }
  static __device__ bool receive(Group<MoeDispatchOp>&, Block<Executor>& block) {
    return moe_dispatch::receive(block);
  }
  /// A worker that reads tokens pulls.
  static MK_HOST_DEVICE bool ends_with_tiles(const Launch&) { return true; }
  static __device__ bool after_tiles(Group<MoeDispatchOp>&) { return true; }

  static OperatorParams<MoeDispatchOp> params(const MoeDispatchArguments& arguments) {
    const MoeDispatchLaunch& launch = arguments.launch;
    const MoeDispatchLayout& layout = launch.plan.layout;
    const std::byte* const own = launch.context.workspaces[launch.context.world.local];
    const auto* const words = reinterpret_cast<const MoePlanWords*>(own + layout.words);
    DeviceState& state = *arguments.frame.state;
    OperatorParams<MoeDispatchOp> params = make_params<MoeDispatchOp>(
        arguments, 0,
        {&words->summary, reinterpret_cast<const RowTile*>(own + layout.tiles), &state.local.stop,
         arguments.columns, Divisor(kMoeBand * arguments.columns), &state.tiles_taken},
        {{arguments.halves, arguments.a_half}, waits_done<MoeDispatchOp>(arguments)},
        {arguments.y});
    if constexpr (!std::is_same_v<Epilogue, RoundedSums>) {
      params.gemm.epilogue = {arguments.bias, nullptr,
                              static_cast<int>(launch.plan.shape.weight_columns())};
    }
    return params;
  }
};

/// A build of few kernels leaves out most of those that differ in their epilogue alone: each takes
/// as long to compile as any.
template <class Element, BLayout kB>
const MoeDispatchKernel* moe_dispatch_kernel_of(MoeEpilogue epilogue, bool bias) {
  using Config = GemmConfig<Element, kB, kMoeTileRows, kMoeTileColumns, 4, 1>;
  if (epilogue == MoeEpilogue::kNone && !bias)
    return &kOperatorKernel<MoeDispatchOp<Config, RoundedSums>>;
#if defined(MK_MOE_FEW_KERNELS)
  constexpr bool kHalves = kB == BLayout::kNK && std::is_same_v<Element, __nv_bfloat16>;
  constexpr bool kPairs = false;
  constexpr bool kPlain = false;  // with a bias
#else
  constexpr bool kHalves = true;
  constexpr bool kPairs = true;
  constexpr bool kPlain = true;
#endif
  if constexpr (kHalves) {
    using Halves = GroupedEpilogue<Config, GroupedActivation::kGatedSiluHalves>;
    if (epilogue == MoeEpilogue::kGatedSilu) return &kOperatorKernel<MoeDispatchOp<Config, Halves>>;
  }
  if constexpr (kPlain) {
    using Plain = GroupedEpilogue<Config, GroupedActivation::kNone>;
    if (epilogue == MoeEpilogue::kNone) return &kOperatorKernel<MoeDispatchOp<Config, Plain>>;
  }
  if constexpr (kPairs) {
    using Pairs = GroupedEpilogue<Config, GroupedActivation::kGatedSiluPairs>;
    if (epilogue == MoeEpilogue::kGatedSiluInterleaved)
      return &kOperatorKernel<MoeDispatchOp<Config, Pairs>>;
  }
  return nullptr;
}

template <class Element>
const MoeDispatchKernel* moe_dispatch_kernel(BLayout b_layout, MoeEpilogue epilogue, bool bias) {
  if (b_layout == BLayout::kNK)
    return moe_dispatch_kernel_of<Element, BLayout::kNK>(epilogue, bias);
  if constexpr (std::is_same_v<Element, __nv_bfloat16>)
    return moe_dispatch_kernel_of<Element, BLayout::kKN>(epilogue, bias);
#if defined(MK_MOE_FEW_KERNELS)
  return nullptr;
#else
  return moe_dispatch_kernel_of<Element, BLayout::kKN>(epilogue, bias);
#endif
}

}  // namespace mk::kernels::cuda
