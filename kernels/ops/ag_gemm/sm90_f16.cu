#include "kernels/cuda/skeleton/product_kernels.cuh"
#include "kernels/ops/ag_gemm/sm90_kernel.cuh"

namespace mk::kernels::cuda {

const AgGemmKernel& ag_gemm_kernel_f16(BLayout b_layout, std::uint32_t columns) {
  return kernel_for<AgGemmOp, __half, 4, 2>(b_layout, columns);
}

}  // namespace mk::kernels::cuda
