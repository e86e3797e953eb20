#include "kernels/cuda/core/grouped_kernels.cuh"

namespace mk::kernels::cuda {

const GroupedKernel& grouped_kernel_bf16(BLayout layout, GroupedActivation activation, bool plain,
                                         GroupedVariant variant) {
  return grouped_kernel<__nv_bfloat16>(layout, activation, plain, variant);
}

}  // namespace mk::kernels::cuda
