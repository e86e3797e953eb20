#include "kernels/cuda/core/attention_kernels.cuh"

namespace mk::kernels::cuda {

const AttentionKernel& attention_kernel_bf16(int head_dim) {
  return plain_attention<__nv_bfloat16>(head_dim);
}

}  // namespace mk::kernels::cuda
