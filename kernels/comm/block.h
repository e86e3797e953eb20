/// \file
/// One block of one launch, of any operator: what it is, and how it shows and awaits flags.
/// Operators add what their flags mean (e.g. gemm_ar/block.h); their roles are functions over that.
#pragma once

#include <cstdint>

#include "kernels/comm/flag_row.h"
#include "kernels/comm/part.h"
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
  /// Whether the executor looks at many flags at once.
  template <class Flag>
  static constexpr bool kLooksAtMany = requires(Executor& executor, Flag&& flag) {
    executor.first_missing(0u, 0u, 0u, flag);
  };

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

  /// The same for a flag that only blocks of this rank await.
  MK_HOST_DEVICE void publish_within_rank(std::uint32_t* flag) {
    executor.stores_done();
    if constexpr (requires { executor.publish_within_rank(flag, epoch); }) {
      executor.publish_within_rank(flag, epoch);
    } else {
      shm::flag_publish(flag, epoch);
    }
  }

  /// Whether all other parts of the chunk, of those that blocks of this role share in, are done,
  /// now that this block has done its own. One of them hears so, and what all have stored is
  /// visible to who acquires its next release. The executor that has parts supplies
  ///     bool last_part(Role, std::uint32_t chunk, std::uint32_t parts);
  MK_HOST_DEVICE bool last_part(std::uint32_t chunk, Part part) {
    if constexpr (requires { executor.last_part(role, chunk, part.count); }) {
      if (part.count == 1) return true;
      executor.stores_done();
      return executor.last_part(role, chunk, part.count);
    } else {
      return true;
    }
  }

  /// Waits until the flag shows `wanted` or later. False: the launch has failed; leave. `site`: see
  /// made_site.
  template <class Site>
  MK_HOST_DEVICE bool await(const Site& site, const std::uint32_t* flag, std::uint32_t wanted) {
    if (!wait_flag(executor, control, site, totals.waits, flag, wanted)) return false;
    executor.loads_begin();
    return true;
  }

  /// Waits, as `await` does, until flags `flag(0)` .. `flag(count - 1)` all show `wanted` or later;
  /// `site_of(i)`. Where the executor can, by looks at many. Each tells of all that are still
  /// missing, so that it takes no look for each of those that come one after the other.
  template <class Flag, class SiteOf>
  MK_HOST_DEVICE bool await_each(std::uint32_t count, std::uint32_t wanted, Flag&& flag,
                                 SiteOf&& site_of) {
    if constexpr (kLooksAtMany<Flag>) {
      // A single flag is acquired by the thread's own load, which is sooner than a look by others.
      if (count == 1) return await([&] { return site_of(0); }, flag(0), wanted);
      if (await_run(0, count, count, wanted, flag, site_of) < count) return false;
      executor.loads_begin();
    } else {
      for (std::uint32_t i = 0; i < count; ++i) {
        if (!await([&] { return site_of(i); }, flag(i), wanted)) return false;
      }
    }
    return true;
  }

  /// Waits until flags `flag(begin)` .. `flag(least - 1)` show `wanted`, one at least, and
  /// answers which of the next ones, up to `end`, is the first that does not. It goes by the last
  /// look; `begin`: the launch has failed. For a block that tells others of what it awaits: its
  /// own bulk loads are not ordered. An executor to which a look costs much looks at many at a
  /// time:
  ///     uint32_t first_missing(begin, end, wanted, flag);
  ///                          the first of `flag(begin)` .. `flag(end - 1)` that is not seen to
  ///                          show `wanted` (those beyond what it looks at at a time are as good as
  ///                          missing); soonest where `flag` is a FlagRow. What the writers of
  ///                          those before it stored is visible then
  ///     uint32_t first_seen();     what the first of them showed
  template <class Flag, class SiteOf>
  MK_HOST_DEVICE std::uint32_t await_run(std::uint32_t begin, std::uint32_t least,
                                         std::uint32_t end, std::uint32_t wanted, Flag&& flag,
                                         SiteOf&& site_of) {
    std::uint32_t missing = begin;
    while (missing < least) {
      const std::uint32_t first = missing;
      const bool reached = wait_until(
          executor, control, [&] { return site_of(first); }, totals.waits, wanted,
          [&](std::uint64_t* seen) {
            if constexpr (kLooksAtMany<Flag>) {
              missing = executor.first_missing(first, end, wanted, flag);
              *seen = executor.first_seen();
            } else {
              const std::uint32_t shown = shm::load_acquire(flag(first));
              missing = first + (shm::epoch_reached(shown, wanted) ? 1 : 0);
              *seen = shown;
            }
            return missing != first;
          });
      if (!reached) return begin;
    }
    return missing;
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
    return totals.waits.log() == nullptr ? 0 : executor.now_ns();
  }
  MK_HOST_DEVICE void span_end(std::uint64_t begin_ns, SpanKind kind, std::uint32_t index0,
                               std::uint32_t index1, std::uint32_t rank) {
    if (shm::BlockProgress* const shown = totals.waits.progress()) {
      if (kind == SpanKind::kTile) shown->tile_done();
      if (kind == SpanKind::kSend) shown->chunk_done();
    }
    TraceLog* const log = totals.waits.log();
    if (log == nullptr) return;
    log->add({begin_ns, executor.now_ns(), {index0, index1}, rank, kind});
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
