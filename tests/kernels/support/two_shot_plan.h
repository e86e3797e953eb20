/// \file
/// GEMM+AllReduce's plan in the two-shot form, where the world has nodes enough for it.
#pragma once

#include <cstdint>

#include "kernels/ops/gemm_ar/spec.h"

namespace mk::kernels::testing {

struct TwoShotPlan : GemmArPlan {
  static constexpr std::uint32_t kNodesLeast = 3;

  static Result<TwoShotPlan> make(std::uint32_t nodes, std::uint32_t locals, Shape max, DType dtype,
                                  Tiling tiling, const GemmResult& result = {}) {
    tiling.exchange = nodes < kNodesLeast ? Exchange::kOneShot : Exchange::kTwoShot;
    MK_ASSIGN_OR_RETURN(const GemmArPlan made,
                        GemmArPlan::make(nodes, locals, max, dtype, tiling, result));
    TwoShotPlan plan;
    static_cast<GemmArPlan&>(plan) = made;
    return plan;
  }
};

}  // namespace mk::kernels::testing
