#include "tests/gpu/attention_abi.h"

#include <string>

#include "kernels/cuda/core/attention.h"

namespace {
using namespace mk::kernels::cuda;  // NOLINT(google-build-using-namespace): a file of forwarders
thread_local std::string error_text;

AttentionTensor tensor_of(void* data, const std::int64_t (&strides)[3]) {
  return {data, strides[0], strides[1], strides[2]};
}
}  // namespace

extern "C" {

void* mk_attention_create(const MkAttentionProblem* from) {
  AttentionProblem problem;
  problem.dtype = static_cast<DType>(from->dtype);
  problem.head_dim = from->head_dim;
  problem.batch = from->batch;
  problem.query_heads = from->query_heads;
  problem.key_heads = from->key_heads;
  problem.queries = from->queries;
  problem.keys = from->keys;
  problem.causal = from->causal != 0;
  problem.scale = from->scale;
  problem.q = tensor_of(from->q, from->strides[0]);
  problem.k = tensor_of(from->k, from->strides[1]);
  problem.v = tensor_of(from->v, from->strides[2]);
  problem.o = tensor_of(from->o, from->strides[3]);
  problem.lse = from->lse;
  problem.lse_batch_stride = from->strides[4][0];
  problem.lse_row_stride = from->strides[4][1];
  problem.lse_head_stride = from->strides[4][2];
  AttentionTuning tuning;
  tuning.blocks_max = from->blocks_max;
  tuning.section = from->section;
  auto plan = AttentionPlan::create(problem, tuning);
  if (!plan) {
    error_text = plan.error().message;
    return nullptr;
  }
  return new AttentionPlan(*plan);
}

int mk_attention_launch(void* plan, void* stream) {
  const auto status =
      static_cast<const AttentionPlan*>(plan)->launch(static_cast<cudaStream_t>(stream));
  if (status) return 0;
  error_text = status.error().message;
  return 1;
}

int mk_attention_tile_keys(void* plan) {
  return static_cast<const AttentionPlan*>(plan)->tile_keys();
}
const char* mk_attention_error() { return error_text.c_str(); }
void mk_attention_destroy(void* plan) { delete static_cast<AttentionPlan*>(plan); }

}  // extern "C"
