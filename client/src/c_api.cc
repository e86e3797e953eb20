/// \file
/// The C ABI's sessions (operators: c_operators.cc). A thin translation of the C++ interface.
/// Exceptions end here: what the standard library throws becomes a status.

#include <cstddef>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "client/src/c_api_support.h"
#include "mkernel/mkernel.h"
#include "shm/limits.h"

namespace mk::c_api {
namespace {

thread_local std::string last_error;

}  // namespace

mk_status answer(const Error& error) {
  last_error = error.message;
  return static_cast<mk_status>(error.code);
}

void clear_error() { last_error.clear(); }

Status check_out_struct(const void* passed, std::size_t known, const char* name) {
  MK_RETURN_IF_ERROR(check_present(passed, name));
  std::size_t given = 0;
  std::memcpy(&given, passed, sizeof(given));
  if (given >= known) return {};
  return fail(ErrorCode::kInvalidArgument, "{}.struct_bytes is {}, set it to sizeof({}) = {}", name,
              given, name, known);
}

Status check_struct(const void* passed, std::size_t known, const char* name) {
  return check_grown_struct(passed, known, known, name);
}

Status check_grown_struct(const void* passed, std::size_t least, std::size_t known,
                          const char* name) {
  MK_RETURN_IF_ERROR(check_present(passed, name));
  std::size_t given = 0;
  std::memcpy(&given, passed, sizeof(given));
  if (given < least) return check_out_struct(passed, known, name);
  // A size that makes no sense must not lead the look below astray.
  constexpr std::size_t kMost = 4096;
  if (given > kMost) {
    return fail(ErrorCode::kInvalidArgument, "{}.struct_bytes is {}, set it to sizeof({}) = {}",
                name, given, name, known);
  }
  const auto* const bytes = static_cast<const std::byte*>(passed);
  for (std::size_t at = known; at < given; ++at) {
    if (bytes[at] == std::byte{}) continue;
    return fail(ErrorCode::kUnsupported,
                "{} has something at byte {}, but this library (version {}) knows {} bytes of it; "
                "take a later library",
                name, at, version(), known);
  }
  return {};
}

}  // namespace mk::c_api

struct mk_blobs {
  std::vector<std::vector<std::byte>> of_rank;
};

using mk::c_api::check_out_struct;
using mk::c_api::check_present;
using mk::c_api::check_struct;
using mk::c_api::guarded;

namespace {

// What the caller names, before what is there.
void take_all_but_place(const mk_attach_options& given, mk::AttachOptions& o) {
  if (given.socket != nullptr && *given.socket != '\0') o.socket = given.socket;
  if (given.job != nullptr && *given.job != '\0') o.job = given.job;
  if (given.job_secret != nullptr)
    o.job_secret.assign(static_cast<const char*>(given.job_secret), given.job_secret_bytes);
  if (given.lanes != 0) o.lanes = given.lanes;
  if (given.timeout_ms != 0) o.timeout = std::chrono::milliseconds{given.timeout_ms};
  if (given.gpu != nullptr) o.gpu = given.gpu;
  if (given.rail != 0) o.rail = static_cast<std::int32_t>(given.rail - 1);
  if (given.arrival_flags != 0) o.arrival_flags = given.arrival_flags;
  if (given.heartbeat_timeout_ms != 0)
    o.heartbeat_timeout = std::chrono::milliseconds{given.heartbeat_timeout_ms};
}

// Null options are allowed with the environment alone.
mk::Result<mk::AttachOptions> options_of(const mk_attach_options* given, bool from_environment) {
  if (given != nullptr || !from_environment)
    MK_RETURN_IF_ERROR(check_struct(given, "mk_attach_options"));
  // Before anything of it is read.
  if (given != nullptr && given->job_secret_bytes > mk::shm::kJobSecretBytesMax) {
    return mk::fail(mk::ErrorCode::kInvalidArgument,
                    "mk_attach_options.job_secret_bytes is {}; a secret has at most {} bytes",
                    given->job_secret_bytes, mk::shm::kJobSecretBytesMax);
  }
  mk::AttachOptions o;
  if (from_environment) {
    MK_ASSIGN_OR_RETURN(o, mk::AttachOptions::from_environment());
  } else {
    o.rank = given->rank;
    o.world = given->world;
    o.node_rank = given->node_rank;
    o.nodes = given->nodes;
    o.local_rank = given->local_rank;
    o.local_size = given->local_size;
  }
  if (given != nullptr) take_all_but_place(*given, o);
  return o;
}

mk::Status attach(const mk::AttachOptions& options, mk_session** out) {
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
    MK_RETURN_IF_ERROR(check_present(out, "out"));
    MK_ASSIGN_OR_RETURN(const auto wanted, options_of(options, false));
    return attach(wanted, out);
  });
}

mk_status mk_session_attach_from_environment(const mk_attach_options* options, mk_session** out) {
  return guarded([&]() -> mk::Status {
    MK_RETURN_IF_ERROR(check_present(out, "out"));
    MK_ASSIGN_OR_RETURN(const auto wanted, options_of(options, true));
    return attach(wanted, out);
  });
}

mk_status mk_session_attach_group(const mk_attach_options* options, uint32_t from_environment,
                                  const uint32_t* ranks, uint64_t count, const char* name,
                                  mk_session** out) {
  return guarded([&]() -> mk::Status {
    MK_RETURN_IF_ERROR(check_present(out, "out"));
    MK_RETURN_IF_ERROR(check_present(ranks, "ranks"));
    if (count > mk::shm::kWorldMax) {
      return mk::fail(mk::ErrorCode::kInvalidArgument,
                      "a group of {} ranks; at most {} are possible: split it", count,
                      mk::shm::kWorldMax);
    }
    MK_ASSIGN_OR_RETURN(const auto whole, options_of(options, from_environment != 0));
    MK_ASSIGN_OR_RETURN(
        const auto group,
        mk::AttachOptions::of_group(whole, {ranks, count}, name != nullptr ? name : "group"));
    return attach(group, out);
  });
}

mk_status mk_session_status(mk_session* session) {
  return guarded([&]() -> mk::Status {
    MK_RETURN_IF_ERROR(check_present(session, "session"));
    return session->session.status();
  });
}

mk_status mk_session_barrier(mk_session* session, uint32_t timeout_ms) {
  return guarded([&]() -> mk::Status {
    MK_RETURN_IF_ERROR(check_present(session, "session"));
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

mk_status mk_session_place(const mk_session* session, mk_place* out) {
  return guarded([&]() -> mk::Status {
    MK_RETURN_IF_ERROR(check_present(session, "session"));
    MK_RETURN_IF_ERROR(check_out_struct(out, "mk_place"));
    const mk::AttachOptions& place = session->session.options();
    out->rank = place.rank;
    out->world = place.world;
    out->node_rank = place.node_rank;
    out->nodes = place.nodes;
    out->local_rank = place.local_rank;
    out->local_size = place.local_size;
    return {};
  });
}

const char* mk_session_fabric(const mk_session* session) {
  return session != nullptr ? session->session.fabric().c_str() : "";
}

mk_status mk_session_exchange(mk_session* session, const char* tag, const void* blob,
                              uint64_t bytes, uint32_t timeout_ms, mk_blobs** out) {
  return guarded([&]() -> mk::Status {
    MK_RETURN_IF_ERROR(check_present(session, "session"));
    MK_RETURN_IF_ERROR(check_present(tag, "tag"));
    MK_RETURN_IF_ERROR(check_present(out, "out"));
    if (bytes != 0) MK_RETURN_IF_ERROR(check_present(blob, "blob"));
    const std::span sent(static_cast<const std::byte*>(blob), bytes);
    const std::chrono::milliseconds timeout{timeout_ms != 0 ? timeout_ms : 60'000};
    MK_ASSIGN_OR_RETURN(auto all, session->session.exchange(tag, sent, timeout));
    *out = new mk_blobs{std::move(all)};
    return {};
  });
}

const void* mk_blobs_at(const mk_blobs* blobs, uint32_t rank, uint64_t* bytes) {
  const bool there = blobs != nullptr && rank < blobs->of_rank.size();
  if (bytes != nullptr) *bytes = there ? blobs->of_rank[rank].size() : 0;
  return there ? blobs->of_rank[rank].data() : nullptr;
}

void mk_blobs_free(mk_blobs* blobs) { delete blobs; }

mk_status mk_session_alloc_buffer(mk_session* session, uint64_t bytes, const char* name,
                                  uint32_t kind, mk_buffer* out) {
  return guarded([&]() -> mk::Status {
    MK_RETURN_IF_ERROR(check_present(session, "session"));
    MK_RETURN_IF_ERROR(check_present(name, "name"));
    MK_RETURN_IF_ERROR(check_out_struct(out, "mk_buffer"));
    if (kind != MK_HOST && kind != MK_DEVICE) {
      return mk::fail(mk::ErrorCode::kInvalidArgument, "kind {} is not MK_HOST or MK_DEVICE", kind);
    }
    MK_ASSIGN_OR_RETURN(const mk::Buffer made, session->session.alloc_buffer(
                                                   bytes, name, static_cast<mk::MemoryKind>(kind)));
    out->data = made.data;
    out->bytes = made.bytes;
    out->handle = made.handle;
    return {};
  });
}

mk_status mk_session_free_buffer(mk_session* session, const mk_buffer* buffer) {
  return guarded([&]() -> mk::Status {
    MK_RETURN_IF_ERROR(check_present(session, "session"));
    MK_RETURN_IF_ERROR(check_struct(buffer, "mk_buffer"));
    if (buffer->handle > 0xFFFF) {
      return mk::fail(mk::ErrorCode::kInvalidArgument, "no buffer has the handle {}",
                      buffer->handle);
    }
    return session->session.free_buffer({static_cast<std::byte*>(buffer->data), buffer->bytes,
                                         static_cast<std::uint16_t>(buffer->handle)});
  });
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
