/// \file
/// The kernels of an operator with a product, by how B lies and by the width of its tiles.
#pragma once

#include "kernels/cuda/skeleton/operator_kernel.cuh"

namespace mk::kernels::cuda {

/// The kernel of an operator for B as it lies and tiles of at most `columns` columns. Stages and
/// staging buffers: see GemmConfig. Those of tiles of 64 columns are for products of few rows: each
/// SM then has many stages of B on their way, as B comes from memory.
///
/// MK_CUDA_FEW_KERNELS leaves out all but the widest, MK_CUDA_NARROW_NK the narrowest for B as
/// [k, n]: a launch takes a wider one instead, which is right but slower.
template <template <class> class Op, class Element, int kStages = 4, int kStaging = 2>
const auto& kernel_for(BLayout b_layout, std::uint32_t columns) {
  const auto of_columns = [&]<BLayout kB>() -> const auto& {
#if !defined(MK_CUDA_FEW_KERNELS)
#if defined(MK_CUDA_NARROW_NK)
    constexpr bool kNarrow = kB == BLayout::kNK;
#else
    constexpr bool kNarrow = true;
#endif
    if constexpr (kNarrow) {
      if (columns <= 64) return kOperatorKernel<Op<GemmConfig<Element, kB, 128, 64, 8, 1, 2>>>;
    }
    // A staging buffer more is a stage less.
    constexpr int kHalfStages = kStaging > 2 ? 5 : 6;
    if (columns <= 128)
      return kOperatorKernel<Op<GemmConfig<Element, kB, 128, 128, kHalfStages, 1, kStaging>>>;
#endif
    return kOperatorKernel<Op<GemmConfig<Element, kB, 128, 256, kStages, 1, kStaging>>>;
  };
  return b_layout == BLayout::kNK ? of_columns.template operator()<BLayout::kNK>()
                                  : of_columns.template operator()<BLayout::kKN>();
}

}  // namespace mk::kernels::cuda
