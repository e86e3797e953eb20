/// \file
/// What a GEMM+Combine launch hands to its kernel. Plain data for host and device.
#pragma once

#include "kernels/cuda/host/operator_arguments.h"
#include "kernels/ops/combine/launch.h"

namespace mk::kernels::cuda {

/// Of a tile, at most.
inline constexpr int kCombineTileRows = 128;
inline constexpr int kCombineTileColumns = 256;

/// `product.a` is y, in windows of kCombineTileRows; `product.b` this rank's experts; `c` the
/// caller's output.
struct CombineArguments : OperatorArguments<CombineLaunch> {
  CUtensorMap a_half;         ///< y in windows of half as many rows
  std::uint32_t columns = 0;  ///< of tiles
};
using CombineKernel = OperatorKernel<CombineArguments>;

/// Null: this build has none.
const CombineKernel* combine_kernel_bf16(BLayout b_layout, CombinePartials partials);
const CombineKernel* combine_kernel_f16(BLayout b_layout, CombinePartials partials);

}  // namespace mk::kernels::cuda
