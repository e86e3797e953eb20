#include "kernels/cuda/core/attention_kernels.cuh"

namespace mk::kernels::cuda {

const AttentionKernel& attention_kernel_f16(int head_dim) {
  return plain_attention<__half>(head_dim);
}

}  // namespace mk::kernels::cuda
