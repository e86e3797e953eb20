/// \file
/// What a GEMM+ReduceScatter launch hands to its kernel. Plain data for host and device.
#pragma once

#include "kernels/cuda/host/operator_arguments.h"
#include "kernels/ops/gemm_rs/launch.h"

namespace mk::kernels::cuda {

/// The two grids of shards (gemm_rs/schedule.h).
inline constexpr std::uint32_t kGemmRsGrids = 2;

/// Maps of the tiles' places, by grid (0: of large shards); which are made depends on the world
/// (gemm_rs/roles.h).
struct GemmRsPlaceMaps {
  CUtensorMap out;       ///< the caller's C
  CUtensorMap out_rows;  ///< the same by rows of tiles without the last, [1][row of tiles]
  CUtensorMap kept[kGemmRsGrids];  ///< [1][tile]...
  CUtensorMap slots[shm::kLocalRanksMax]
                   [kGemmRsGrids];               ///< this rank's at each owner, [node][tile]
  CUtensorMap staging[kBanksMax][kGemmRsGrids];  ///< [peer index][tile]
};

struct GemmRsArguments : OperatorArguments<GemmRsLaunch> {
  GemmRsPlaceMaps places;
  TileGrid numbered;     ///< of one rank alone
  CUtensorMap partials;  ///< of this rank's own tiles, in its slots, [source][tile]
};
using GemmRsKernel = OperatorKernel<GemmRsArguments>;

const GemmRsKernel& gemm_rs_kernel_bf16(BLayout b_layout, std::uint32_t columns);
const GemmRsKernel& gemm_rs_kernel_f16(BLayout b_layout, std::uint32_t columns);
inline constexpr KernelChoice<GemmRsArguments> kGemmRsKernels = {gemm_rs_kernel_bf16,
                                                                 gemm_rs_kernel_f16};

}  // namespace mk::kernels::cuda
