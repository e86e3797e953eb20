#include "kernels/cuda/skeleton/product_kernels.cuh"
#include "kernels/ops/ag_gemm/sm90_kernel.cuh"

namespace mk::kernels::cuda {

const AgGemmKernel& ag_gemm_kernel_bf16(BLayout b_layout, std::uint32_t columns) {
  return kernel_for<AgGemmOp, __nv_bfloat16, 4, 2>(b_layout, columns);
}

}  // namespace mk::kernels::cuda
