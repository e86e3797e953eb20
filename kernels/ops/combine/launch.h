/// \file
/// What the blocks of one GEMM + Combine launch share. Plain data; the same struct goes to a CUDA
/// kernel.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/comm/launch.h"
#include "kernels/ops/combine/geometry.h"
#include "kernels/ops/combine/row_index.h"

namespace mk::kernels {

/// Launch::m, which must be the same on all ranks; tokens need not be.
inline constexpr std::uint32_t kCombineM = 1;

struct CombineLaunch : Launch {
  CombineGeometry plan;
  // The handle: what MoE Dispatch + GEMM left on this rank.
  const MoeRow* rows = nullptr;
  const std::uint32_t* offsets = nullptr;  ///< by expert of this rank, and the end
  bool complete = true;                    ///< false: it failed here, and there are no rows
  // This rank's tokens.
  RoutingTable routing;                 ///< as they were dispatched; the weights are the rows'
  const std::byte* residual = nullptr;  ///< [tokens][H], or null: none
};

}  // namespace mk::kernels
