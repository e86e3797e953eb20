/// \file
/// What the blocks of one MoE Dispatch + GEMM launch share. Plain data; the same struct goes to a
/// CUDA kernel.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/comm/launch.h"
#include "kernels/ops/moe/geometry.h"
#include "kernels/ops/moe/routing_plan.h"

namespace mk::kernels {

/// Launch::m, which must be the same on all ranks; tokens need not be.
inline constexpr std::uint32_t kMoeDispatchM = 1;

struct MoeDispatchLaunch : Launch {
  MoeDispatchGeometry plan;
  RoutingTable routing;               ///< this rank's, in the caller's memory
  const std::byte* tokens = nullptr;  ///< routing.tokens rows of H elements, dense; the caller's
  std::uint32_t capacity = 0;         ///< rows of the caller's output, at most plan.shape.rows_max
};

}  // namespace mk::kernels
