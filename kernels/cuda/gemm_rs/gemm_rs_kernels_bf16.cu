#include "kernels/cuda/gemm_rs/gemm_rs_device.cuh"

namespace mk::kernels::cuda {

const GemmRsKernel& gemm_rs_kernel_bf16(BLayout b_layout, std::uint32_t columns) {
  return b_layout == BLayout::kNK ? kernel_for<GemmRsOp, __nv_bfloat16, BLayout::kNK>(columns)
                                  : kernel_for<GemmRsOp, __nv_bfloat16, BLayout::kKN>(columns);
}

}  // namespace mk::kernels::cuda
