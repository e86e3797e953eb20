#include "kernels/cuda/core/gemm_kernels.cuh"

namespace mk::kernels::cuda {

const PlainGemmKernel& plain_gemm_bf16(BLayout b_layout, GemmVariant variant) {
  return plain_gemm<__nv_bfloat16>(b_layout, variant);
}

}  // namespace mk::kernels::cuda
