#include "kernels/cuda/gemm_ar/gemm_ar_device.cuh"

namespace mk::kernels::cuda {

const GemmArKernel& gemm_ar_kernel_bf16(BLayout b_layout, std::uint32_t columns) {
  return kernel_for<GemmArOp, __nv_bfloat16>(b_layout, columns);
}

}  // namespace mk::kernels::cuda
