#include "kernels/ops/combine/sm90_kernel.cuh"

namespace mk::kernels::cuda {

const CombineKernel* combine_kernel_bf16(BLayout b_layout, CombinePartials partials) {
  return combine_kernel<__nv_bfloat16>(b_layout, partials);
}

}  // namespace mk::kernels::cuda
