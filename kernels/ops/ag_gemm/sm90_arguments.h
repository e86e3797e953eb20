/// \file
/// What an AllGather+GEMM launch hands to its kernel. Plain data for host and device.
#pragma once

#include "kernels/cuda/host/operator_arguments.h"
#include "kernels/ops/ag_gemm/launch.h"

namespace mk::kernels::cuda {

/// `product.a` is this rank's shard, in the caller's memory.
struct AgGemmArguments : OperatorArguments<AgGemmLaunch> {
  CUtensorMap gathered;  ///< [bank * ranks + origin][row][k], in this rank's workspace
  CUtensorMap c_tile;    ///< C as [m, n], box 64 x 64
  CUtensorMap c_eight;   ///< C as [m, n], box 8 x 64: the ends of tiles
};
using AgGemmKernel = OperatorKernel<AgGemmArguments>;

const AgGemmKernel& ag_gemm_kernel_bf16(BLayout b_layout, std::uint32_t columns);
const AgGemmKernel& ag_gemm_kernel_f16(BLayout b_layout, std::uint32_t columns);
inline constexpr KernelChoice<AgGemmArguments> kAgGemmKernels = {ag_gemm_kernel_bf16,
                                                                 ag_gemm_kernel_f16};

}  // namespace mk::kernels::cuda
