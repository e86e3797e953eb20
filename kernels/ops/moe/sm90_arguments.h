/// \file
/// What a MoE Dispatch+GEMM launch hands to its kernel. Plain data for host and device.
#pragma once

#include "kernels/cuda/host/operator_arguments.h"
#include "kernels/ops/moe/launch.h"

namespace mk::kernels::cuda {

/// Columns of weights that a tile takes. (Gated: half as many of the output.)
inline constexpr int kMoeTileColumns = 256;
/// Rows of a tile, at most.
inline constexpr int kMoeTileRows = 128;
/// Row tiles of a band (banded_tile): their rows and a wave's weights stay in L2.
inline constexpr std::uint32_t kMoeBand = 8;

/// Of a launch's groups that stream (RoleBlocks::pull: all of them pull), so many share this rank's
/// routing and tokens, the last ones: those that do not plan, or, where all plan, all.
MK_HOST_DEVICE constexpr std::uint32_t moe_sharers(const RoleBlocks& blocks) {
  return blocks.pull > blocks.plan ? blocks.pull - blocks.plan : blocks.pull;
}

/// `product.a` is the packed rows, in windows of kMoeTileRows; `product.b` this rank's experts.
struct MoeDispatchArguments : OperatorArguments<MoeDispatchLaunch> {
  CUtensorMap a_half;          ///< the packed rows in windows of half as many rows
  CUtensorMap y;               ///< the caller's output, in windows of 64 rows
  std::uint32_t columns = 0;   ///< of tiles
  int halves = 1;              ///< of a tile's columns that lie in as many places of the weights
  const void* bias = nullptr;  ///< of this rank's experts, or null
};
using MoeDispatchKernel = OperatorKernel<MoeDispatchArguments>;

/// Null: this build has none.
/// `bias`: the shape has one.
const MoeDispatchKernel* moe_dispatch_kernel_bf16(BLayout b_layout, MoeEpilogue epilogue,
                                                  bool bias);
const MoeDispatchKernel* moe_dispatch_kernel_f16(BLayout b_layout, MoeEpilogue epilogue, bool bias);

}  // namespace mk::kernels::cuda
