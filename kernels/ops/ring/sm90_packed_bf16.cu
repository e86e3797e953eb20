#include "kernels/ops/ring/sm90_kernel.cuh"

namespace mk::kernels::cuda {

const RingAttentionKernel* ring_attention_packed_kernel_bf16(std::uint32_t head_dim) {
  return ring_attention_of<__nv_bfloat16, RingSequences::kPacked>(head_dim);
}

}  // namespace mk::kernels::cuda
