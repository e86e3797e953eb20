/// \file
/// The C ABI's GEMM + ReduceScatter.

#include "client/src/c_api_support.h"
#include "mkernel/gemm_reduce_scatter.h"

struct mk_gemm_rs {
  mk::GemmReduceScatter op;
};

using namespace mk::c_api;

extern "C" {

void mk_rows_of_rank(uint64_t rows, uint32_t world, uint32_t rank, uint64_t* first,
                     uint64_t* count) {
  const mk::RowRange range = mk::rows_of_rank(rows, world == 0 ? 1 : world, rank);
  if (first != nullptr) *first = range.first;
  if (count != nullptr) *count = range.count;
}

mk_status mk_gemm_rs_create(mk_session* session, const mk_gemm_rs_shape* shape, mk_gemm_rs** out) {
  return create_product<mk::GemmReduceScatter>(session, shape, "mk_gemm_rs_shape", out);
}

mk_status mk_gemm_rs_workspace_bytes(mk_session* session, const mk_gemm_rs_shape* shape,
                                     uint64_t* bytes) {
  return product_bytes<mk::GemmReduceScatter>(session, shape, "mk_gemm_rs_shape", bytes);
}

mk_status mk_gemm_rs_launch(mk_gemm_rs* op, const void* a, const void* b, void* c, uint64_t m,
                            uint32_t mode, mk_launch_stats* stats) {
  return launch(op, mode, stats,
                [&](auto& made, mk::LaunchMode wanted) { return made.launch(a, b, c, m, wanted); });
}

mk_status mk_gemm_rs_launch_on(mk_gemm_rs* op, void* stream, const void* a, const void* b, void* c,
                               uint64_t m, uint32_t mode) {
  return launch_on(op, mode, [&](auto& made, mk::LaunchMode wanted) {
    return made.launch_on(static_cast<mk::CudaStream>(stream), a, b, c, m, wanted);
  });
}

mk_status mk_gemm_rs_status(const mk_gemm_rs* op) { return status_of(op); }

mk_status mk_gemm_rs_finish(mk_gemm_rs* op, void* stream, mk_launch_stats* stats) {
  return finish(op, stream, stats);
}

void mk_gemm_rs_destroy(mk_gemm_rs* op) { delete op; }

}  // extern "C"
