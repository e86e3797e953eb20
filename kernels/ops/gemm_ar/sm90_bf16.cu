#include "kernels/cuda/skeleton/product_kernels.cuh"
#include "kernels/ops/gemm_ar/sm90_kernel.cuh"

namespace mk::kernels::cuda {

// As in ../gemm_rs/: room to stage a whole tile, at the price of a stage.
const GemmArKernel& gemm_ar_kernel_bf16(BLayout b_layout, std::uint32_t columns) {
  return kernel_for<GemmArOp, __nv_bfloat16, 3, 4>(b_layout, columns);
}

}  // namespace mk::kernels::cuda
