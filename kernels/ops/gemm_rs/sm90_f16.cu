#include "kernels/cuda/skeleton/product_kernels.cuh"
#include "kernels/ops/gemm_rs/sm90_kernel.cuh"

namespace mk::kernels::cuda {

// Three stages leave room to stage a whole tile, so that math goes on while tiles leave over
// NVLink.
const GemmRsKernel& gemm_rs_kernel_f16(BLayout b_layout, std::uint32_t columns) {
  return kernel_for<GemmRsOp, __half, 3, 4>(b_layout, columns);
}

}  // namespace mk::kernels::cuda
