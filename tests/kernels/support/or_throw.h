/// \file
/// Values that a test cannot go on without.
#pragma once

#include <stdexcept>
#include <utility>

#include "shm/host/result.h"

namespace mk::kernels::testing {

/// The value, or an exception that says why there is none.
template <class T>
T or_throw(Result<T> made) {
  if (!made) throw std::runtime_error(made.error().message);
  return std::move(*made);
}

}  // namespace mk::kernels::testing
