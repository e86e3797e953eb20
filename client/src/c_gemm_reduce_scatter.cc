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
  return guarded([&]() -> mk::Status {
    if (session == nullptr || out == nullptr)
      return mk::fail(mk::ErrorCode::kInvalidArgument, "session or out is null");
    MK_RETURN_IF_ERROR(check_struct(shape, "mk_gemm_rs_shape"));
    mk::Tuning tuning;
    if (shape->wait_timeout_ms != 0)
      tuning.wait_timeout = std::chrono::milliseconds{shape->wait_timeout_ms};
    tuning.executor = static_cast<mk::Executor>(shape->executor);
    const mk::GemmReduceScatter::Shape wanted{shape->m_max, shape->n, shape->k,
                                              static_cast<mk::DataType>(shape->dtype),
                                              static_cast<mk::BLayout>(shape->b_layout)};
    MK_ASSIGN_OR_RETURN(auto op, mk::GemmReduceScatter::create(session->session, wanted, tuning));
    *out = new mk_gemm_rs{std::move(op)};
    return {};
  });
}

mk_status mk_gemm_rs_launch(mk_gemm_rs* op, const void* a, const void* b, void* c, uint64_t m,
                            uint32_t mode, mk_launch_stats* stats) {
  return guarded([&]() -> mk::Status {
    if (op == nullptr) return mk::fail(mk::ErrorCode::kInvalidArgument, "op is null");
    MK_ASSIGN_OR_RETURN(const mk::LaunchMode wanted, checked_mode(mode));
    MK_RETURN_IF_ERROR(check_stats(stats));
    MK_ASSIGN_OR_RETURN(const mk::LaunchStats done, op->op.launch(a, b, c, m, wanted));
    return fill(stats, done);
  });
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
