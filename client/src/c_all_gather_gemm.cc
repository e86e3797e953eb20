/// \file
/// The C ABI's AllGather + GEMM.

#include "client/src/c_api_support.h"
#include "mkernel/all_gather_gemm.h"

struct mk_ag_gemm {
  mk::AllGatherGemm op;
};

using namespace mk::c_api;

extern "C" {

mk_status mk_ag_gemm_create(mk_session* session, const mk_ag_gemm_shape* shape, mk_ag_gemm** out) {
  return create_product<mk::AllGatherGemm>(session, shape, "mk_ag_gemm_shape", out);
}

mk_status mk_ag_gemm_workspace_bytes(mk_session* session, const mk_ag_gemm_shape* shape,
                                     uint64_t* bytes) {
  return product_bytes<mk::AllGatherGemm>(session, shape, "mk_ag_gemm_shape", bytes);
}

mk_status mk_ag_gemm_launch(mk_ag_gemm* op, const void* a_shard, const void* b, void* c,
                            void* gathered, uint64_t m, uint32_t mode, mk_launch_stats* stats) {
  return launch(op, mode, stats, [&](auto& made, mk::LaunchMode wanted) {
    return made.launch(a_shard, b, c, m, wanted, gathered);
  });
}

mk_status mk_ag_gemm_launch_on(mk_ag_gemm* op, void* stream, const void* a_shard, const void* b,
                               void* c, void* gathered, uint64_t m, uint32_t mode) {
  return launch_on(op, mode, [&](auto& made, mk::LaunchMode wanted) {
    return made.launch_on(static_cast<mk::CudaStream>(stream), a_shard, b, c, m, wanted, gathered);
  });
}

void* mk_ag_gemm_input(const mk_ag_gemm* op) { return op != nullptr ? op->op.input() : nullptr; }

mk_status mk_ag_gemm_status(const mk_ag_gemm* op) { return status_of(op); }

mk_status mk_ag_gemm_finish(mk_ag_gemm* op, void* stream, mk_launch_stats* stats) {
  return finish(op, stream, stats);
}

void mk_ag_gemm_destroy(mk_ag_gemm* op) { delete op; }

}  // extern "C"
