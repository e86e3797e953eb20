#include "kernels/cuda/gemm_ar/gemm_ar_device.cuh"

namespace mk::kernels::cuda {

const GemmArKernel& gemm_ar_kernel_f16(BLayout b_layout, std::uint32_t columns) {
  return b_layout == BLayout::kNK ? kernel_for<GemmArOp, __half, BLayout::kNK>(columns)
                                  : kernel_for<GemmArOp, __half, BLayout::kKN>(columns);
}

}  // namespace mk::kernels::cuda
