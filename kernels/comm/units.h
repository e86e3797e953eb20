/// \file
/// Counts of what runs, each with its unit. A count in another unit does not compile; say
/// warpgroups_of() or thread_blocks_of(). Compiles for host and device.
#pragma once

#include <cstdint>

#include "shm/platform.h"

namespace mk::kernels {

/// So many of a unit. A plain number is in whatever unit it is given to.
template <class Unit>
class Count {
 public:
  // NOLINTNEXTLINE(google-explicit-constructor): a plain number is in the unit it is given to
  MK_HOST_DEVICE constexpr Count(std::uint32_t count = 0) : count_(count) {}
  template <class Other>
  Count(const Count<Other>&) = delete;  // convert it

  MK_HOST_DEVICE constexpr std::uint32_t count() const { return count_; }
  // NOLINTNEXTLINE(google-explicit-constructor): a count is a number wherever no unit is asked for
  MK_HOST_DEVICE constexpr operator std::uint32_t() const { return count_; }

 private:
  std::uint32_t count_;
};

/// A thread block of 384 threads; it has an SM to itself.
using ThreadBlocks = Count<struct ThreadBlockUnit>;
/// 128 threads that run a role.
using Warpgroups = Count<struct WarpgroupUnit>;
/// What a caller deals out: multiprocessors.
using Sms = Count<struct SmUnit>;

inline constexpr std::uint32_t kWarpgroupsOfBlock = 3;

MK_HOST_DEVICE constexpr ThreadBlocks thread_blocks_of(Sms sms) { return sms.count(); }
MK_HOST_DEVICE constexpr Warpgroups warpgroups_of(ThreadBlocks blocks) {
  return blocks.count() * kWarpgroupsOfBlock;
}
MK_HOST_DEVICE constexpr Warpgroups warpgroups_of(Sms sms) {
  return warpgroups_of(thread_blocks_of(sms));
}

}  // namespace mk::kernels
