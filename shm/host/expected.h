/// \file
/// The answer of every fallible call of mkernel: a value or an Error. An Error has a stable code
/// and one sentence: what failed, with the ids involved, and what to do. This header is part of
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
