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
  return guarded([&]() -> mk::Status {
    if (session == nullptr || out == nullptr)
      return mk::fail(mk::ErrorCode::kInvalidArgument, "session or out is null");
    MK_RETURN_IF_ERROR(check_struct(shape, "mk_ag_gemm_shape"));
    mk::Tuning tuning;
    if (shape->wait_timeout_ms != 0)
      tuning.wait_timeout = std::chrono::milliseconds{shape->wait_timeout_ms};
    tuning.executor = static_cast<mk::Executor>(shape->executor);
    const mk::AllGatherGemm::Shape wanted{shape->m_max, shape->n, shape->k,
                                          static_cast<mk::DataType>(shape->dtype),
                                          static_cast<mk::BLayout>(shape->b_layout)};
    MK_ASSIGN_OR_RETURN(auto op, mk::AllGatherGemm::create(session->session, wanted, tuning));
    *out = new mk_ag_gemm{std::move(op)};
    return {};
  });
}

mk_status mk_ag_gemm_launch(mk_ag_gemm* op, const void* a_shard, const void* b, void* c,
                            void* gathered, uint64_t m, uint32_t mode, mk_launch_stats* stats) {
  return guarded([&]() -> mk::Status {
    if (op == nullptr) return mk::fail(mk::ErrorCode::kInvalidArgument, "op is null");
    MK_ASSIGN_OR_RETURN(const mk::LaunchMode wanted, checked_mode(mode));
    MK_RETURN_IF_ERROR(check_stats(stats));
    MK_ASSIGN_OR_RETURN(const mk::LaunchStats done,
                        op->op.launch(a_shard, b, c, m, wanted, gathered));
    return fill(stats, done);
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
