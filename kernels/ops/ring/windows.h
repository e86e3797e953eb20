/// \file
/// What of a launch is one window of heads' (RingAttentionGeometry::windows): of its tensors, and
/// of its statistics. Host only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/comm/launch_stats.h"
#include "kernels/ops/ring/geometry.h"

namespace mk::kernels {

/// Elements from a tensor's first head to the window's first one; `group` query heads for a key
/// head, and 1 of K and V.
template <class Stride>
constexpr Stride first_of_window(const HeadWindow& heads, std::uint32_t group, Stride batch_stride,
                                 Stride head_stride) {
  return static_cast<Stride>(heads.batch) * batch_stride +
         static_cast<Stride>(heads.key_head * group) * head_stride;
}

/// Of the windows so far and the next one, which is a launch of the protocol by itself, what the
/// whole launch's statistics are.
inline LaunchStats with_window(const LaunchStats& before, const LaunchStats& window) {
  LaunchStats both = window;
  both.total_ns += before.total_ns;
  both.gemm_ns += before.total_ns;
  both.network_bytes += before.network_bytes;
  both.commands += before.commands;
  both.nonfinite_partials += before.nonfinite_partials;
  for (std::uint32_t role = 0; role < kRoles; ++role) {
    RoleStats& to = both.roles[role];
    if (to.blocks != 0) to.end_ns += before.total_ns;
    to.waits += before.roles[role].waits;
    to.wait_ns += before.roles[role].wait_ns;
  }
  return both;
}

}  // namespace mk::kernels
