#include "kernels/ops/moe/sm90_kernel.cuh"

namespace mk::kernels::cuda {

const MoeDispatchKernel* moe_dispatch_kernel_bf16(BLayout b_layout, MoeEpilogue epilogue,
                                                  bool bias) {
  return moe_dispatch_kernel<__nv_bfloat16>(b_layout, epilogue, bias);
}

}  // namespace mk::kernels::cuda
