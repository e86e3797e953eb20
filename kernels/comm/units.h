/// \file
/// Counts of what runs, each with its unit. A count in another unit does not compile, and neither
/// does a sum or a comparison of two units; say warpgroups_of() or thread_blocks_of(). Compiles for
/// host and device.
#pragma once

#include <cstdint>
#include <type_traits>

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

  MK_HOST_DEVICE constexpr Count& operator+=(Count more) { return *this = count_ + more.count_; }
  MK_HOST_DEVICE constexpr Count& operator-=(Count less) { return *this = count_ - less.count_; }

 private:
  std::uint32_t count_;
};

template <class Unit>
MK_HOST_DEVICE constexpr Count<Unit> operator+(Count<Unit> a, Count<Unit> b) {
  return a.count() + b.count();
}
template <class Unit>
MK_HOST_DEVICE constexpr Count<Unit> operator-(Count<Unit> a, Count<Unit> b) {
  return a.count() - b.count();
}
// Of unlike units: convert one of them.
template <class A, class B>
requires(!std::is_same_v<A, B>) void operator+(Count<A>, Count<B>) = delete;
template <class A, class B>
requires(!std::is_same_v<A, B>) void operator-(Count<A>, Count<B>) = delete;
template <class A, class B>
requires(!std::is_same_v<A, B>) void operator==(Count<A>, Count<B>) = delete;
template <class A, class B>
requires(!std::is_same_v<A, B>) void operator<(Count<A>, Count<B>) = delete;
template <class A, class B>
requires(!std::is_same_v<A, B>) void operator>(Count<A>, Count<B>) = delete;

/// A thread block of 384 threads; it has an SM to itself.
using ThreadBlocks = Count<struct ThreadBlockUnit>;
/// 128 threads that run a role.
using Warpgroups = Count<struct WarpgroupUnit>;
/// What a caller deals out: multiprocessors.
using Sms = Count<struct SmUnit>;

/// A worker runs a role, with an index of its own: on a CPU a thread. On a GPU a thread block
/// computes tiles, and a warpgroup runs any other role. (Where nothing is multiplied, warpgroups do
/// it all.)
using ComputeWorkers = Count<struct ComputeWorkerUnit>;
using Workers = Count<struct WorkerUnit>;

inline constexpr std::uint32_t kWarpgroupsOfBlock = 3;

MK_HOST_DEVICE constexpr ThreadBlocks thread_blocks_of(Sms sms) { return sms.count(); }
MK_HOST_DEVICE constexpr Warpgroups warpgroups_of(ThreadBlocks blocks) {
  return blocks.count() * kWarpgroupsOfBlock;
}
// On a GPU.
MK_HOST_DEVICE constexpr ThreadBlocks thread_blocks_of(ComputeWorkers workers) {
  return workers.count();
}
MK_HOST_DEVICE constexpr Warpgroups warpgroups_of(ComputeWorkers workers) {
  return warpgroups_of(thread_blocks_of(workers));
}
MK_HOST_DEVICE constexpr Warpgroups warpgroups_of(Workers workers) { return workers.count(); }
MK_HOST_DEVICE constexpr Warpgroups warpgroups_of(Sms sms) {
  return warpgroups_of(thread_blocks_of(sms));
}

}  // namespace mk::kernels
