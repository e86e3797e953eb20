#include "kernels/cuda/ag_gemm/ag_gemm_device.cuh"

namespace mk::kernels::cuda {

const AgGemmKernel& ag_gemm_kernel_bf16(BLayout b_layout, std::uint32_t columns) {
  return b_layout == BLayout::kNK ? kernel_for<AgGemmOp, __nv_bfloat16, BLayout::kNK>(columns)
                                  : kernel_for<AgGemmOp, __nv_bfloat16, BLayout::kKN>(columns);
}

}  // namespace mk::kernels::cuda
