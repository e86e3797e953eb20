/// \file
/// The C ABI's sessions; operators are in files of their own (c_<operator>.cc). A thin translation
/// of the C++ interface. Exceptions end here: what the standard library throws becomes a status.

#include <cstddef>
#include <string>

#include "client/src/c_api_support.h"
#include "mkernel/mkernel.h"

namespace mk::c_api {
namespace {

thread_local std::string last_error;

}  // namespace

mk_status answer(const Error& error) {
  last_error = error.message;
  return static_cast<mk_status>(error.code);
}

void clear_error() { last_error.clear(); }

Status check_struct(bool present, std::size_t given, std::size_t least, const char* name) {
  if (!present) return fail(ErrorCode::kInvalidArgument, "{} is null", name);
  if (given < least) {
    return fail(ErrorCode::kInvalidArgument, "{}.struct_bytes is {}, set it to sizeof({}) = {}",
                name, given, name, least);
  }
  return {};
}

Result<LaunchMode> checked_mode(std::uint32_t mode) {
  if (mode == MK_FUSED || mode == MK_UNFUSED || mode == MK_AUTO)
    return static_cast<LaunchMode>(mode);
  return fail(ErrorCode::kInvalidArgument, "mode {} is not MK_FUSED, MK_UNFUSED or MK_AUTO", mode);
}

Status check_stats(const mk_launch_stats* to) {
  if (to == nullptr) return {};
  return check_struct(true, to->struct_bytes, offsetof(mk_launch_stats, estimated_fused_ns),
                      "mk_launch_stats");
}

Status fill(mk_launch_stats* to, const LaunchStats& stats) {
  if (to == nullptr) return {};
  to->epoch = stats.epoch;
  to->mode = static_cast<uint32_t>(stats.mode);
  to->total_ns = stats.total_ns;
  to->compute_ns = stats.compute_ns;
  to->network_bytes = stats.network_bytes;
  to->network_commands = stats.network_commands;
  // Callers built before these fields were there have no room for them.
  if (to->struct_bytes < offsetof(mk_launch_stats, nonfinite_partials)) return {};
  to->estimated_fused_ns = stats.estimated_fused_ns;
  to->estimated_unfused_ns = stats.estimated_unfused_ns;
  if (to->struct_bytes < sizeof(*to)) return {};
  to->nonfinite_partials = stats.nonfinite_partials;
  return {};
}

}  // namespace mk::c_api

using mk::c_api::check_struct;
using mk::c_api::guarded;

namespace {

mk::Status attach(const mk::AttachOptions& options, mk_session** out) {
  if (out == nullptr) return mk::fail(mk::ErrorCode::kInvalidArgument, "out is null");
  MK_ASSIGN_OR_RETURN(auto session, mk::Session::attach(options));
  *out = new mk_session{std::move(session)};
  return {};
}

}  // namespace

extern "C" {

const char* mk_version(void) { return mk::version(); }
const char* mk_last_error(void) { return mk::c_api::last_error.c_str(); }
const char* mk_status_name(mk_status status) {
  return mk::error_code_name(static_cast<mk::ErrorCode>(status));
}

mk_status mk_session_attach(const mk_attach_options* options, mk_session** out) {
  return guarded([&]() -> mk::Status {
    MK_RETURN_IF_ERROR(check_struct(options, "mk_attach_options"));
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

}  // extern "C"
