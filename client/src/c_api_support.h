/// \file
/// How the C ABI answers: statuses, the last error's sentence, structs with a size.
#pragma once

#include <cstddef>
#include <exception>
#include <new>

#include "mkernel/mkernel_c.h"
#include "mkernel/session.h"
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

inline Status check_present(const void* passed, const char* name) {
  if (passed != nullptr) return {};
  return fail(ErrorCode::kInvalidArgument, "{} is null", name);
}

/// What was passed as `name` ("mk_tuning") is there and has `known` bytes, those that this library
/// knows. A caller built against a later header has more, and gets kUnsupported if it set one.
/// Every such struct begins with its size.
Status check_struct(const void* passed, std::size_t known, const char* name);
template <class Struct>
Status check_struct(const Struct* passed, const char* name) {
  static_assert(offsetof(Struct, struct_bytes) == 0);
  return check_struct(passed, sizeof(Struct), name);
}
/// The same of a struct that has had `least` bytes before fields were added: of an older caller's.
Status check_grown_struct(const void* passed, std::size_t least, std::size_t known,
                          const char* name);
/// The same of a struct that is to be filled: what is behind the known bytes is let alone.
Status check_out_struct(const void* passed, std::size_t known, const char* name);
template <class Struct>
Status check_out_struct(const Struct* passed, const char* name) {
  static_assert(offsetof(Struct, struct_bytes) == 0);
  return check_out_struct(passed, sizeof(Struct), name);
}

}  // namespace mk::c_api
