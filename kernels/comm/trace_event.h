/// \file
/// A span of a trace (trace.h) with the block it is of, as hosts hand it out.
#pragma once

#include <cstdint>

#include "kernels/comm/trace.h"
#include "kernels/comm/wait.h"

namespace mk::kernels {

struct TraceEvent {
  Role role = Role::kCompute;
  std::uint32_t block = 0;
  TraceSpan span;
};

}  // namespace mk::kernels
