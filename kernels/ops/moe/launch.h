/// \file
/// What the blocks of one MoE Dispatch+GEMM launch share. Plain data; the same struct goes to a
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

/// One rank's input of one launch, as its caller has it. It is dense, in memory of the host or of
/// the GPU. On a GPU tokens, expert_weights and bias are at multiples of 16 bytes.
struct MoeDispatchInput {
  const void* tokens = nullptr;          ///< [count][H]
  const std::int32_t* ids = nullptr;     ///< [count][top_k]: 0 to E - 1, or -1: nowhere
  const float* weights = nullptr;        ///< [count][top_k]: handed through; numbers
  std::uint32_t count = 0;               ///< 0 to the plan's tokens_max
  const void* expert_weights = nullptr;  ///< of this rank's experts, one after the other
  const void* bias = nullptr;            ///< likewise, if the shape has one; else null
};

/// What becomes of launches that nobody on the host waits for: those that computed nothing, because
/// the rows did not fit or a table made no sense. All zero before the first launch.
struct MoeRefusals {
  std::uint32_t count = 0;     ///< written last
  std::uint32_t epoch = 0;     ///< of the last of them
  std::uint32_t capacity = 0;  ///< its
  PlanSummary summary;         ///< its
};

struct MoeDispatchLaunch : Launch {
  MoeDispatchGeometry plan;
  RoutingTable routing;               ///< this rank's, in the caller's memory
  const std::byte* tokens = nullptr;  ///< routing.tokens rows of H elements, dense; the caller's
  std::uint32_t capacity = 0;         ///< rows of the caller's output, at most plan.shape.rows_max
  bool by_dma = false;              ///< copy engines bring this rank's tokens to the node's others
  MoeRefusals* refusals = nullptr;  ///< null: the host looks at each launch's summary
};

}  // namespace mk::kernels
