/// \file
/// One block of one launch, of any operator: what it is, and how it shows and awaits flags.
/// Operators add what their flags mean (e.g. gemm_ar/block.h); their roles are functions over that.
#pragma once

#include <cstdint>

#include "kernels/comm/wait.h"
#include "shm/flag.h"

namespace mk::kernels {

/// What one block did.
struct BlockTotals {
  WaitTotals waits;
  std::uint64_t commands = 0;
  std::uint64_t network_bytes = 0;
};

/// The executor supplies, besides what the operator's roles ask for:
///     void stores_done();      all this block stored is visible to who acquires its next release
///     void loads_begin();      bulk loads from here on see what this block acquired
///     and the pacer of comm/wait.h
template <class Executor>
class Block {
 public:
  MK_HOST_DEVICE Block(Executor& executor_in, const WaitControl& control_in, BlockTotals& totals_in,
                       Role role_in, std::uint32_t index_in, std::uint32_t epoch_in)
      : executor(executor_in),
        control(control_in),
        totals(totals_in),
        role(role_in),
        index(index_in),
        epoch(epoch_in) {}

  Executor& executor;
  const WaitControl& control;
  BlockTotals& totals;
  const Role role;
  const std::uint32_t index;  ///< within the role
  const std::uint32_t epoch;

  /// Shows this launch's epoch in the flag. Release: what this block stored before is visible to
  /// who sees it.
  MK_HOST_DEVICE void publish(std::uint32_t* flag) {
    executor.stores_done();
    shm::flag_publish(flag, epoch);
  }

  /// Waits until the flag shows `wanted` or later. False: the launch has failed; leave.
  MK_HOST_DEVICE bool await(const WaitSite& site, const std::uint32_t* flag, std::uint32_t wanted) {
    if (!wait_flag(executor, control, site, totals.waits, flag, wanted)) return false;
    executor.loads_begin();
    return true;
  }

  /// Waits, as `await` does, until flags `flag(0)` .. `flag(count - 1)` all show `wanted` or later;
  /// `site_of(i)`. On a GPU, where a look takes most of a microsecond, many at a time, and one
  /// fence for all of them.
  template <class Flag, class SiteOf>
  MK_HOST_DEVICE bool await_each(std::uint32_t count, std::uint32_t wanted, Flag&& flag,
                                 SiteOf&& site_of) {
    if constexpr (requires { executor.acquire_fence(); }) {
      for (std::uint32_t i = 0; (i = first_missing(i, count, wanted, flag)) < count; ++i) {
        if (!await(site_of(i), flag(i), wanted)) return false;
      }
      executor.acquire_fence();
      executor.loads_begin();
    } else {
      for (std::uint32_t i = 0; i < count; ++i) {
        if (!await(site_of(i), flag(i), wanted)) return false;
      }
    }
    return true;
  }

  /// The first of flags `flag(begin)` .. `flag(end - 1)` that is not seen to show `wanted`; orders
  /// nothing.
  template <class Flag>
  MK_HOST_DEVICE static std::uint32_t first_missing(std::uint32_t begin, std::uint32_t end,
                                                    std::uint32_t wanted, Flag&& flag) {
    constexpr std::uint32_t kAtOnce = 8;
    for (; begin < end; begin += kAtOnce) {
      std::uint32_t seen[kAtOnce];
      for (std::uint32_t i = 0; i < kAtOnce; ++i)
        seen[i] = shm::load_relaxed(flag(begin + i < end ? begin + i : begin));
      for (std::uint32_t i = 0; i < kAtOnce && begin + i < end; ++i) {
        if (!shm::epoch_reached(seen[i], wanted)) return begin + i;
      }
    }
    return end;
  }

  /// This block's wait for a flag of that kind; see WaitSite.
  MK_HOST_DEVICE WaitSite site(FlagKind kind, std::uint32_t rank, std::uint32_t index0,
                               std::uint32_t index1, std::uint32_t hops) const {
    WaitSite site;
    site.role = role;
    site.kind = kind;
    site.block = index;
    site.rank = rank;
    site.index[0] = index0;
    site.index[1] = index1;
    site.hops = hops;
    return site;
  }

  /// Whether another block has failed. For stretches of work without a wait.
  MK_HOST_DEVICE bool stopped() const { return shm::load_acquire(control.stop) != 0; }

  // --- What this block does when; nothing when nobody asked for it ---

  MK_HOST_DEVICE std::uint64_t span_begin() {
    return totals.waits.trace == nullptr ? 0 : executor.now_ns();
  }
  MK_HOST_DEVICE void span_end(std::uint64_t begin_ns, SpanKind kind, std::uint32_t index0,
                               std::uint32_t index1, std::uint32_t rank) {
    if (totals.waits.trace == nullptr) return;
    totals.waits.trace->add({begin_ns, executor.now_ns(), {index0, index1}, rank, kind});
  }
  /// Something without length.
  MK_HOST_DEVICE void span_mark(SpanKind kind, std::uint32_t index0, std::uint32_t index1,
                                std::uint32_t rank) {
    span_end(span_begin(), kind, index0, index1, rank);
  }

  /// Ends the launch for a reason that the executor has noted.
  MK_HOST_DEVICE void stop() { shm::store_release(control.stop, 1u); }
};

}  // namespace mk::kernels
