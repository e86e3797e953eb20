/// \file
/// The C ABI's GEMM + AllReduce.

#include "client/src/c_api_support.h"
#include "mkernel/gemm_all_reduce.h"

struct mk_gemm_ar {
  mk::GemmAllReduce op;
};

using namespace mk::c_api;

extern "C" {

mk_status mk_gemm_ar_create(mk_session* session, const mk_gemm_ar_shape* shape, mk_gemm_ar** out) {
  return create_product<mk::GemmAllReduce>(session, shape, "mk_gemm_ar_shape", out);
}

mk_status mk_gemm_ar_workspace_bytes(mk_session* session, const mk_gemm_ar_shape* shape,
                                     uint64_t* bytes) {
  return product_bytes<mk::GemmAllReduce>(session, shape, "mk_gemm_ar_shape", bytes);
}

mk_status mk_gemm_ar_launch(mk_gemm_ar* op, const void* a, const void* b, void* c, uint64_t m,
                            uint32_t mode, mk_launch_stats* stats) {
  return launch(op, mode, stats,
                [&](auto& made, mk::LaunchMode wanted) { return made.launch(a, b, c, m, wanted); });
}

mk_status mk_gemm_ar_launch_on(mk_gemm_ar* op, void* stream, const void* a, const void* b, void* c,
                               uint64_t m, uint32_t mode) {
  return launch_on(op, mode, [&](auto& made, mk::LaunchMode wanted) {
    return made.launch_on(static_cast<mk::CudaStream>(stream), a, b, c, m, wanted);
  });
}

mk_status mk_gemm_ar_status(const mk_gemm_ar* op) { return status_of(op); }

mk_status mk_gemm_ar_finish(mk_gemm_ar* op, void* stream, mk_launch_stats* stats) {
  return finish(op, stream, stats);
}

const void* mk_gemm_ar_output(const mk_gemm_ar* op) {
  return op != nullptr ? op->op.output() : nullptr;
}
void mk_gemm_ar_destroy(mk_gemm_ar* op) { delete op; }

}  // extern "C"
