/// \file
/// How the C ABI answers: statuses, the last error's sentence, structs with a size.
#pragma once

#include <cstddef>
#include <exception>
#include <new>

#include "mkernel/mkernel_c.h"
#include "mkernel/types.h"
#include "shm/host/result.h"

struct mk_session {
  mk::Session session;
};

namespace mk::c_api {

/// Keeps the sentence for mk_last_error.
mk_status answer(const Error& error);
void clear_error();

/// Runs `body`, which returns a Status, and turns its result (or an exception) into a status and a
/// sentence.
template <class Body>
mk_status guarded(Body&& body) noexcept {
  try {
    clear_error();
    const Status status = body();
    return status ? 0 : answer(status.error());
  } catch (const std::bad_alloc&) {
    return answer({ErrorCode::kSystem, "out of memory"});
  } catch (const std::exception& exception) {
    return answer({ErrorCode::kInternal, exception.what()});
  }
}

/// `name` names what was passed ("mk_gemm_ar_shape"), of which `given` bytes are set.
Status check_struct(bool present, std::size_t given, std::size_t least, const char* name);
template <class Struct>
Status check_struct(const Struct* passed, const char* name) {
  return check_struct(passed != nullptr, passed != nullptr ? passed->struct_bytes : 0,
                      sizeof(Struct), name);
}
Result<LaunchMode> checked_mode(std::uint32_t mode);
/// `to` may be null.
Status fill(mk_launch_stats* to, const LaunchStats& stats);
/// Before a launch: `to` is null or large enough.
Status check_stats(const mk_launch_stats* to);

// --- What operators are asked for, each alike. A handle holds the operator as `op`. ---

/// What the caller's shape says of the tuning, after a look whether it is a shape of this name.
template <class Shape>
Result<Tuning> checked_tuning(const Shape* shape, const char* name) {
  Tuning tuning;
  if constexpr (requires { shape->count_nonfinite; }) {
    // Callers built before this field was there end before it.
    MK_RETURN_IF_ERROR(check_struct(shape != nullptr, shape != nullptr ? shape->struct_bytes : 0,
                                    offsetof(Shape, count_nonfinite), name));
    const std::size_t all = offsetof(Shape, count_nonfinite) + sizeof(shape->count_nonfinite);
    if (shape->struct_bytes >= all) tuning.count_nonfinite = shape->count_nonfinite != 0;
  } else {
    MK_RETURN_IF_ERROR(check_struct(shape, name));
  }
  if (shape->wait_timeout_ms != 0)
    tuning.wait_timeout = std::chrono::milliseconds{shape->wait_timeout_ms};
  if constexpr (requires { shape->executor; })
    tuning.executor = static_cast<Executor>(shape->executor);
  return tuning;
}

/// `make(session, tuning)`: the operator, of the caller's shape; `name` names that.
template <class Handle, class Shape, class Make>
mk_status create(mk_session* session, const Shape* shape, const char* name, Handle** out,
                 Make&& make) {
  return guarded([&]() -> Status {
    if (session == nullptr || out == nullptr)
      return fail(ErrorCode::kInvalidArgument, "session or out is null");
    MK_ASSIGN_OR_RETURN(const Tuning tuning, checked_tuning(shape, name));
    MK_ASSIGN_OR_RETURN(auto op, make(session->session, tuning));
    *out = new Handle{std::move(op)};
    return {};
  });
}
/// `ask(session, tuning)`: the bytes that the operator would take.
template <class Shape, class Ask>
mk_status workspace_bytes(mk_session* session, const Shape* shape, const char* name, uint64_t* out,
                          Ask&& ask) {
  return guarded([&]() -> Status {
    if (session == nullptr || out == nullptr)
      return fail(ErrorCode::kInvalidArgument, "session or bytes is null");
    MK_ASSIGN_OR_RETURN(const Tuning tuning, checked_tuning(shape, name));
    MK_ASSIGN_OR_RETURN(*out, ask(session->session, tuning));
    return {};
  });
}

/// An operator of a dense product.
template <class Op, class Shape>
typename Op::Shape product_shape(const Shape& shape) {
  return {shape.m_max, shape.n, shape.k, static_cast<DataType>(shape.dtype),
          static_cast<BLayout>(shape.b_layout)};
}
template <class Op, class Handle, class Shape>
mk_status create_product(mk_session* session, const Shape* shape, const char* name, Handle** out) {
  return create(session, shape, name, out, [&](Session& on, const Tuning& tuning) {
    return Op::create(on, product_shape<Op>(*shape), tuning);
  });
}
template <class Op, class Shape>
mk_status product_bytes(mk_session* session, const Shape* shape, const char* name, uint64_t* out) {
  return workspace_bytes(session, shape, name, out, [&](Session& on, const Tuning& tuning) {
    return Op::workspace_bytes(on, product_shape<Op>(*shape), tuning);
  });
}

/// `run(op, mode)`: a launch's statistics.
template <class Handle, class Run>
mk_status launch(Handle* handle, std::uint32_t mode, mk_launch_stats* stats, Run&& run) {
  return guarded([&]() -> Status {
    if (handle == nullptr) return fail(ErrorCode::kInvalidArgument, "op is null");
    MK_ASSIGN_OR_RETURN(const LaunchMode wanted, checked_mode(mode));
    MK_RETURN_IF_ERROR(check_stats(stats));
    MK_ASSIGN_OR_RETURN(const LaunchStats done, run(handle->op, wanted));
    return fill(stats, done);
  });
}
/// Of those that run on GPUs: `launch(op, mode)` puts a launch on a stream.
template <class Handle, class Launch>
mk_status launch_on(Handle* handle, std::uint32_t mode, Launch&& launch) {
  return guarded([&]() -> Status {
    if (handle == nullptr) return fail(ErrorCode::kInvalidArgument, "op is null");
    MK_ASSIGN_OR_RETURN(const LaunchMode wanted, checked_mode(mode));
    return launch(handle->op, wanted);
  });
}
template <class Handle>
mk_status status_of(const Handle* handle) {
  return guarded([&]() -> Status {
    if (handle == nullptr) return fail(ErrorCode::kInvalidArgument, "op is null");
    return handle->op.status();
  });
}
template <class Handle>
mk_status finish(Handle* handle, void* stream, mk_launch_stats* stats) {
  return guarded([&]() -> Status {
    if (handle == nullptr) return fail(ErrorCode::kInvalidArgument, "op is null");
    MK_RETURN_IF_ERROR(check_stats(stats));
    MK_ASSIGN_OR_RETURN(const LaunchStats done, handle->op.finish(static_cast<CudaStream>(stream)));
    return fill(stats, done);
  });
}

}  // namespace mk::c_api
