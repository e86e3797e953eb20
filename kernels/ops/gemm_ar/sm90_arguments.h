/// \file
/// What a GEMM+AllReduce launch hands to its kernel. Plain data for host and device.
#pragma once

#include "kernels/comm/tile_grid.h"
#include "kernels/cuda/host/operator_arguments.h"
#include "kernels/ops/gemm_ar/launch.h"

namespace mk::kernels::cuda {

/// Local ranks of a node whose compute blocks may add up their own tiles.
inline constexpr std::uint32_t kSumsOwnLocals = 2;

/// Maps of the tiles' places; which are made depends on the world (gemm_ar/roles.h).
struct GemmArPlaceMaps {
  CUtensorMap out[kSumsOwnLocals];         ///< C as [m, n] of each local rank; one alone: its own
  CUtensorMap slots[shm::kLocalRanksMax];  ///< this rank's slots at each owner, tile by tile
  CUtensorMap staging[kBanksMax];          ///< this rank's staging banks, tile by tile
};

struct GemmArArguments : OperatorArguments<GemmArLaunch> {
  GemmArPlaceMaps places;
  TileGrid numbered;     ///< of one rank alone
  CUtensorMap partials;  ///< of this rank's own tiles, in its slots, [source][tile]
};
using GemmArKernel = OperatorKernel<GemmArArguments>;

const GemmArKernel& gemm_ar_kernel_bf16(BLayout b_layout, std::uint32_t columns);
const GemmArKernel& gemm_ar_kernel_f16(BLayout b_layout, std::uint32_t columns);
inline constexpr KernelChoice<GemmArArguments> kGemmArKernels = {gemm_ar_kernel_bf16,
                                                                 gemm_ar_kernel_f16};

}  // namespace mk::kernels::cuda
