/// \file
/// How every fallible call of mkernel answers: a value, or an Error with a stable code and one
/// sentence that says what failed, with the ids involved, and what to do. This header is part of
/// libmkclient's public interface; result.h adds what our own code uses to make errors.
#pragma once

#include <string>
#include <tl/expected.hpp>

#include "shm/error_code.h"

namespace mk {

struct Error {
  ErrorCode code = ErrorCode::kInternal;
  std::string message;

  friend bool operator==(const Error&, const Error&) = default;
};

template <class T>
using Result = tl::expected<T, Error>;
using Status = Result<void>;

}  // namespace mk
