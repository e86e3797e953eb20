/// \file
/// Flags that lie evenly apart: who looks at many of them needs no list. Compiles for host and
/// device.
#pragma once

#include <cstdint>

#include "shm/platform.h"

namespace mk::kernels {

/// Flag i is `first[i * step]`.
struct FlagRow {
  const std::uint32_t* first = nullptr;
  std::uint32_t step = 1;

  MK_HOST_DEVICE const std::uint32_t* operator()(std::uint32_t i) const {
    return first + std::uint64_t{i} * step;
  }
};

}  // namespace mk::kernels
