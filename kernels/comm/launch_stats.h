/// \file
/// What one launch of one rank did, for users, benchmarks and metrics.
#pragma once

#include <cstdint>

#include "kernels/comm/launch_work.h"
#include "kernels/comm/partition.h"
#include "kernels/comm/types.h"
#include "kernels/comm/wait.h"

namespace mk::kernels {

/// What one role did in a launch. Times are from the start of the launch on this rank.
struct RoleStats {
  std::uint32_t blocks = 0;
  std::uint64_t end_ns = 0;   ///< when its last block was done
  std::uint64_t wait_ns = 0;  ///< spent in waits, summed over its blocks
  std::uint64_t waits = 0;    ///< waits that were not over at the first look
};

struct LaunchStats {
  std::uint32_t epoch = 0;
  std::uint32_t m = 0;
  Mode mode = Mode::kFused;  ///< as run
  Estimate estimate;         ///< before it ran; 0: none was made
  std::uint64_t total_ns = 0;
  std::uint64_t gemm_ns = 0;  ///< from the start until this rank's last tile was stored (or its
                              ///< compute blocks had shared its rows, if that took longer)
  std::uint64_t network_bytes = 0;  ///< payload this rank sent to rail peers
  std::uint64_t commands = 0;       ///< commands it wrote, flag-only ones included
  /// If asked for: elements of what this rank added up, products of one rank and sums of one node,
  /// that were NaN or infinite.
  std::uint64_t nonfinite_partials = 0;
  PartitionStats partition;      ///< of an adaptive one; else all 0
  RoleStats roles[kRoles] = {};  ///< by Role; a thread counts in the role that it starts in

  const RoleStats& role(Role role) const { return roles[static_cast<std::uint32_t>(role)]; }
};

}  // namespace mk::kernels
