#include "kernels/ops/moe/sm90_kernel.cuh"

namespace mk::kernels::cuda {

const MoeDispatchKernel* moe_dispatch_kernel_f16(BLayout b_layout, MoeEpilogue epilogue) {
  return moe_dispatch_kernel<__half>(b_layout, epilogue);
}

}  // namespace mk::kernels::cuda
