/// \file
/// The C ABI: a thin translation of mkernel.h. Exceptions end here: what the standard library
/// throws becomes a status.

#include <cstring>
#include <exception>
#include <new>
#include <string>

#include "client/src/session_impl.h"
#include "mkernel/mkernel.h"
#include "mkernel/mkernel_c.h"

struct mk_session {
  mk::Session session;
};
struct mk_gemm_ar {
  mk::GemmAllReduce op;
};

namespace {

thread_local std::string last_error;

mk_status answer(const mk::Error& error) {
  last_error = error.message;
  return static_cast<mk_status>(error.code);
}

/// Runs `body`, which returns a Status, and turns its result (or an exception) into a status and a
/// sentence.
template <class Body>
mk_status guarded(Body&& body) noexcept {
  try {
    last_error.clear();
    const mk::Status status = body();
    return status ? 0 : answer(status.error());
  } catch (const std::bad_alloc&) {
    return answer({mk::ErrorCode::kSystem, "out of memory"});
  } catch (const std::exception& exception) {
    return answer({mk::ErrorCode::kInternal, exception.what()});
  }
}

mk::Status check_struct(bool present, std::size_t given, std::size_t least, const char* name) {
  if (!present) return mk::fail(mk::ErrorCode::kInvalidArgument, "{} is null", name);
  if (given < least) {
    return mk::fail(mk::ErrorCode::kInvalidArgument,
                    "{}.struct_bytes is {}, set it to sizeof({}) = {}", name, given, name, least);
  }
  return {};
}

mk::Status attach(const mk::AttachOptions& options, mk_session** out) {
  if (out == nullptr) return mk::fail(mk::ErrorCode::kInvalidArgument, "out is null");
  MK_ASSIGN_OR_RETURN(auto session, mk::Session::attach(options));
  *out = new mk_session{std::move(session)};
  return {};
}

}  // namespace

extern "C" {

const char* mk_version(void) { return mk::version(); }
const char* mk_last_error(void) { return last_error.c_str(); }
const char* mk_status_name(mk_status status) {
  return mk::error_code_name(static_cast<mk::ErrorCode>(status));
}

mk_status mk_session_attach(const mk_attach_options* options, mk_session** out) {
  return guarded([&]() -> mk::Status {
    MK_RETURN_IF_ERROR(check_struct(options != nullptr,
                                    options != nullptr ? options->struct_bytes : 0,
                                    sizeof(mk_attach_options), "mk_attach_options"));
    mk::AttachOptions o;
    if (options->socket != nullptr) o.socket = options->socket;
    if (options->job != nullptr) o.job = options->job;
    o.rank = options->rank;
    o.world = options->world;
    o.node_rank = options->node_rank;
    o.nodes = options->nodes;
    o.local_rank = options->local_rank;
    o.local_size = options->local_size;
    if (options->lanes != 0) o.lanes = options->lanes;
    if (options->timeout_ms != 0) o.timeout = std::chrono::milliseconds{options->timeout_ms};
    return attach(o, out);
  });
}

mk_status mk_session_attach_from_environment(mk_session** out) {
  return guarded([&]() -> mk::Status {
    MK_ASSIGN_OR_RETURN(const auto options, mk::AttachOptions::from_environment());
    return attach(options, out);
  });
}

mk_status mk_session_status(mk_session* session) {
  return guarded([&]() -> mk::Status {
    if (session == nullptr) return mk::fail(mk::ErrorCode::kInvalidArgument, "session is null");
    return session->session.status();
  });
}

mk_status mk_session_barrier(mk_session* session, uint32_t timeout_ms) {
  return guarded([&]() -> mk::Status {
    if (session == nullptr) return mk::fail(mk::ErrorCode::kInvalidArgument, "session is null");
    return timeout_ms == 0 ? session->session.barrier()
                           : session->session.barrier(std::chrono::milliseconds{timeout_ms});
  });
}

uint32_t mk_session_rank(const mk_session* session) {
  return session != nullptr ? session->session.options().rank : 0;
}
uint32_t mk_session_world(const mk_session* session) {
  return session != nullptr ? session->session.options().world : 0;
}

mk_status mk_session_detach(mk_session* session) {
  return guarded([&]() -> mk::Status {
    if (session == nullptr) return {};
    const mk::Status status = session->session.detach();
    delete session;
    return status;
  });
}

mk_status mk_gemm_ar_create(mk_session* session, const mk_gemm_ar_shape* shape, mk_gemm_ar** out) {
  return guarded([&]() -> mk::Status {
    if (session == nullptr || out == nullptr)
      return mk::fail(mk::ErrorCode::kInvalidArgument, "session or out is null");
    MK_RETURN_IF_ERROR(check_struct(shape != nullptr, shape != nullptr ? shape->struct_bytes : 0,
                                    sizeof(mk_gemm_ar_shape), "mk_gemm_ar_shape"));
    mk::GemmAllReduce::Tuning tuning;
    if (shape->wait_timeout_ms != 0)
      tuning.wait_timeout = std::chrono::milliseconds{shape->wait_timeout_ms};
    const mk::GemmAllReduce::Shape wanted{shape->m_max, shape->n, shape->k,
                                          static_cast<mk::DataType>(shape->dtype),
                                          static_cast<mk::BLayout>(shape->b_layout)};
    MK_ASSIGN_OR_RETURN(auto op, mk::GemmAllReduce::create(session->session, wanted, tuning));
    *out = new mk_gemm_ar{std::move(op)};
    return {};
  });
}

mk_status mk_gemm_ar_launch(mk_gemm_ar* op, const void* a, const void* b, void* c, uint64_t m,
                            uint32_t mode, mk_launch_stats* stats) {
  return guarded([&]() -> mk::Status {
    if (op == nullptr) return mk::fail(mk::ErrorCode::kInvalidArgument, "op is null");
    if (mode != MK_FUSED && mode != MK_UNFUSED) {
      return mk::fail(mk::ErrorCode::kInvalidArgument, "mode {} is neither MK_FUSED nor MK_UNFUSED",
                      mode);
    }
    if (stats != nullptr) {
      MK_RETURN_IF_ERROR(
          check_struct(true, stats->struct_bytes, sizeof(mk_launch_stats), "mk_launch_stats"));
    }
    MK_ASSIGN_OR_RETURN(const mk::LaunchStats s,
                        op->op.launch(a, b, c, m, static_cast<mk::LaunchMode>(mode)));
    if (stats != nullptr) {
      stats->epoch = s.epoch;
      stats->mode = static_cast<uint32_t>(s.mode);
      stats->total_ns = s.total_ns;
      stats->compute_ns = s.compute_ns;
      stats->network_bytes = s.network_bytes;
      stats->network_commands = s.network_commands;
    }
    return {};
  });
}

const void* mk_gemm_ar_output(const mk_gemm_ar* op) {
  return op != nullptr ? op->op.output() : nullptr;
}
void mk_gemm_ar_destroy(mk_gemm_ar* op) { delete op; }

}  // extern "C"
