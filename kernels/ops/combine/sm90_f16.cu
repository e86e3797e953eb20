#include "kernels/ops/combine/sm90_kernel.cuh"

namespace mk::kernels::cuda {

const CombineKernel* combine_kernel_f16(BLayout b_layout, CombinePartials partials) {
  return combine_kernel<__half>(b_layout, partials);
}

}  // namespace mk::kernels::cuda
