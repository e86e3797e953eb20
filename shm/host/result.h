/// \file
/// Making and passing on errors (expected.h).
#pragma once

#include <fmt/format.h>

#include <string>
#include <utility>

#include "shm/host/expected.h"

namespace mk {

/// An Error ready to be returned from any function that answers Result: `return
/// fail(ErrorCode::kTimeout, "...", ...)`.
template <class... Args>
tl::unexpected<Error> fail(ErrorCode code, fmt::format_string<Args...> format, Args&&... args) {
  return tl::unexpected<Error>(Error{code, fmt::format(format, std::forward<Args>(args)...)});
}

/// Passes an error on: `if (!result) return propagate(result);`
template <class T>
tl::unexpected<Error> propagate(const Result<T>& result) {
  return tl::unexpected<Error>(result.error());
}

/// The text of an errno value, e.g. "No such file or directory (ENOENT)". Thread-safe.
std::string errno_text(int error_number);

/// An Error for a failed system call, errno's text appended.
template <class... Args>
tl::unexpected<Error> fail_errno(int error_number, fmt::format_string<Args...> format,
                                 Args&&... args) {
  return tl::unexpected<Error>(
      Error{ErrorCode::kSystem,
            fmt::format(format, std::forward<Args>(args)...) + ": " + errno_text(error_number)});
}

}  // namespace mk

/// Evaluates `expression` (a Result); on error returns it from the enclosing function, else binds
/// the value.
#define MK_CONCAT_INNER(a, b) a##b
#define MK_CONCAT(a, b) MK_CONCAT_INNER(a, b)
#define MK_ASSIGN_OR_RETURN_INNER(temporary, declaration, expression) \
  auto temporary = (expression);                                      \
  if (!temporary) return ::mk::propagate(temporary);                  \
  declaration = std::move(*temporary)
#define MK_ASSIGN_OR_RETURN(declaration, expression) \
  MK_ASSIGN_OR_RETURN_INNER(MK_CONCAT(mk_result_, __LINE__), declaration, expression)
#define MK_RETURN_IF_ERROR(expression)                                                   \
  do {                                                                                   \
    if (auto mk_status_ = (expression); !mk_status_) return ::mk::propagate(mk_status_); \
  } while (false)
