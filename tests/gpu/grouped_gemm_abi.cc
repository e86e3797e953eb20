#include "tests/gpu/grouped_gemm_abi.h"

#include <string>

#include "kernels/cuda/core/grouped_gemm.h"

namespace {
using namespace mk::kernels::cuda;  // NOLINT(google-build-using-namespace): a file of forwarders
thread_local std::string error_text;
}  // namespace

extern "C" {

void* mk_grouped_create(const MkGroupedProblem* from) {
  GroupedGemmProblem problem;
  problem.dtype = static_cast<DType>(from->dtype);
  problem.b_layout = static_cast<BLayout>(from->b_layout);
  problem.activation = static_cast<GroupedActivation>(from->activation);
  problem.experts = from->experts;
  problem.rows_max = from->rows_max;
  problem.n = from->n;
  problem.k = from->k;
  problem.a = from->a;
  problem.b = from->b;
  problem.c = from->c;
  problem.offsets = from->offsets;
  problem.counts = from->counts;
  problem.bias = from->bias;
  problem.row_scale = from->row_scale;
  GroupedGemmTuning tuning;
  tuning.variant = static_cast<GroupedVariant>(from->variant);
  tuning.band_rows = from->band_rows;
  tuning.blocks_max = from->blocks_max;
  auto plan = GroupedGemmPlan::create(problem, tuning);
  if (!plan) {
    error_text = plan.error().message;
    return nullptr;
  }
  return new GroupedGemmPlan(*plan);
}

int mk_grouped_launch(void* plan, void* stream) {
  const auto status =
      static_cast<const GroupedGemmPlan*>(plan)->launch(static_cast<cudaStream_t>(stream));
  if (status) return 0;
  error_text = status.error().message;
  return 1;
}

const char* mk_grouped_variant(void* plan) {
  return grouped_variant_name(static_cast<const GroupedGemmPlan*>(plan)->variant());
}
const char* mk_grouped_error() { return error_text.c_str(); }
void mk_grouped_destroy(void* plan) { delete static_cast<GroupedGemmPlan*>(plan); }

}  // extern "C"
