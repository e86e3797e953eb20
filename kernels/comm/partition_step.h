/// \file
/// A partition's target over time, for traces.
#pragma once

#include <cstdint>

namespace mk::kernels {

/// A target, as it was published.
struct PartitionStep {
  std::uint64_t at_ns = 0;
  std::uint32_t target = 0;         ///< workers (on GPUs SMs) that shall communicate
  std::uint32_t communicating = 0;  ///< that did when it was decided
};

}  // namespace mk::kernels
