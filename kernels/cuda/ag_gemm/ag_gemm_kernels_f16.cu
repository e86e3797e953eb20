#include "kernels/cuda/ag_gemm/ag_gemm_device.cuh"

namespace mk::kernels::cuda {

const AgGemmKernel& ag_gemm_kernel_f16(BLayout b_layout, std::uint32_t columns) {
  return b_layout == BLayout::kNK ? kernel_for<AgGemmOp, __half, BLayout::kNK>(columns)
                                  : kernel_for<AgGemmOp, __half, BLayout::kKN>(columns);
}

}  // namespace mk::kernels::cuda
