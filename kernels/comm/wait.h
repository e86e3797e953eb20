/// \file
/// The one wait of all roles. It ends when its flag shows what was expected, when a stop word is
/// set, or at its deadline. In the last two cases it records who waited for what and returns false,
/// and the role leaves.
#pragma once

#include <cstdint>

#include "kernels/comm/trace.h"
#include "shm/atomic.h"
#include "shm/flag.h"
#include "shm/platform.h"
#include "shm/progress.h"

namespace mk::kernels {

/// What a block does. Operators use those they need.
enum class Role : std::uint8_t {
  kCompute = 0,  ///< tiles of this rank
  kReduce = 1,   ///< sums over the local ranks
  kSend = 2,     ///< commands to the daemon
  kReceive = 3,  ///< sums over the nodes, hands out the result
  kCollect = 4,  ///< sees the result arrive from every owner
  kShare = 5,    ///< hands this rank's own input to its node and to its send blocks
  kPlan = 6,     ///< finds out from all ranks' routing what this rank has to compute
  kPull = 7,     ///< packs the rows that this rank needs
};
inline constexpr std::uint32_t kRoles = 8;
static_assert(kRoles == shm::kProgressRoles, "people read of roles by these numbers");

/// What was waited for. The comment says what a record's two indices mean.
enum class FlagKind : std::uint8_t {
  kLaunchRecord = 0,  ///< local rank, -
  kTileReady = 1,     ///< source's local rank, owned tile
  kChunkReduced = 2,  ///< chunk, -
  kOutReady = 3,      ///< owner's local rank, chunk
  kArrival = 4,       ///< node, chunk
  kRelease = 5,       ///< node, bank
  kCredit = 6,        ///< lane, -
  kCompleted = 7,     ///< lane, -
  kBlockDone = 8,     ///< role of the other block, its index
  kFinished = 9,      ///< local rank, -
  kRowsReady = 10,    ///< rank whose rows they are, chunk
  kPlanReady = 11,    ///< -, -
  kRowsPacked = 12,   ///< row tile, -
  kShardsSent = 13,   ///< local rank, -
  kPassedOn = 14,     ///< -, -: by DMA engines, to the node's others
  kRowsIndexed = 15,  ///< local rank, -
};
static_assert(static_cast<std::uint32_t>(FlagKind::kRowsIndexed) + 1 == shm::kProgressWaits,
              "and of waits");

/// Why a wait ended.
enum class WaitEnd : std::uint8_t {
  kReached = 0,
  kTimeout = 1,       ///< the deadline passed
  kSessionAbort = 2,  ///< the daemon ended the session
  kProcessAbort = 3,  ///< this process lost its daemon
  kPeerFailed = 4,    ///< a local rank's launch failed
  kStopped = 5,       ///< another block of this launch failed
  kMismatch =
      6,  ///< not a wait: `site.rank` launched with m = `seen`, this rank with m = `expected`
};

constexpr const char* name_of(Role role) {
  return shm::kProgressRoleNames[static_cast<std::uint32_t>(role)].data();
}

/// Who waits for what. `rank` is the one that is behind when the wait takes long, as far as the
/// waiting side can know.
struct WaitSite {
  Role role = Role::kCompute;
  FlagKind kind = FlagKind::kTileReady;
  std::uint32_t block = 0;  ///< within its role
  std::uint32_t rank = 0;
  std::uint32_t index[2] = {};
  /// How many ranks may stand between the cause and `rank`: 0 if `rank` itself is late, 1 or 2 if
  /// it may be waiting in turn. Each adds a quarter to the deadline, so that the wait next to the
  /// cause gives up first and names it.
  std::uint32_t hops = 0;
};

/// A wait in 32 bits, for a kernel has no registers to spare where it waits; 0: none.
struct AwaitedWord {
  MK_HOST_DEVICE static constexpr std::uint32_t encode(const WaitSite& site) {
    return (static_cast<std::uint32_t>(site.kind) + 1) << 24 | (site.hops & 0xffu) << 16 |
           (site.rank & 0xffffu);
  }
  /// As people are told of it.
  MK_HOST_DEVICE static constexpr std::uint64_t role_word(std::uint32_t word) {
    return word == 0 ? 0
                     : shm::encode({.running = 1,
                                    .waiting = 1,
                                    .rank = word & 0xffffu,
                                    .wait = (word >> 24) - 1,
                                    .hops = word >> 16 & 0xffu});
  }
};

/// The first failed wait of an operator; later ones do not overwrite it.
struct WaitRecord {
  std::uint32_t claimed = 0;  ///< 1 once a block writes or has written the rest
  WaitEnd end = WaitEnd::kReached;
  WaitSite site;
  std::uint64_t expected = 0;
  std::uint64_t seen = 0;
  std::uint64_t waited_ns = 0;
  /// Not of the failure: what a wait of each role that lasts is for (AwaitedWord), by the last
  /// block that looked at the clock in it. A kernel's only; its poller takes them out again.
  std::uint32_t awaited[kRoles] = {};
};

/// What every wait of a launch looks at besides its flag.
struct WaitControl {
  const std::uint32_t* session_abort = nullptr;  ///< null: none
  const std::uint32_t* process_abort = nullptr;  ///< null: none
  const std::uint32_t* peer_failed = nullptr;    ///< null: none
  std::uint32_t* stop = nullptr;  ///< set by the first block of the launch that fails
  WaitRecord* record = nullptr;
  std::uint64_t timeout_ns = 0;

  /// Orders nothing: who hears of an end reads nothing that it would have to acquire.
  MK_HOST_DEVICE WaitEnd stop_reason() const {
    const auto look = [](const std::uint32_t* word) {
      return word != nullptr ? shm::load_relaxed(word) : 0;
    };
    // All on their way together: on a GPU each takes as long as a look at the flag, which may come
    // meanwhile.
    const std::uint32_t session = look(session_abort);
    const std::uint32_t process = look(process_abort);
    const std::uint32_t stopped = look(stop);
    const std::uint32_t peer = look(peer_failed);
    if (session != 0) return WaitEnd::kSessionAbort;
    if (process != 0) return WaitEnd::kProcessAbort;
    if (stopped != 0) return WaitEnd::kStopped;
    if (peer != 0) return WaitEnd::kPeerFailed;
    return WaitEnd::kReached;
  }
};

/// Waits of one block, counted; and, where others look, what the block did when and what it does.
struct WaitTotals {
  std::uint64_t count = 0;
  std::uint64_t ns = 0;
  TraceLog* trace = nullptr;            ///< of a thread of the host, if anybody asked for it
  shm::BlockProgress* shown = nullptr;  ///< likewise, if there is a daemon

  /// A kernel keeps none, and has no code for it.
  MK_HOST_DEVICE TraceLog* log() const {
#if defined(__CUDA_ARCH__)
    return nullptr;
#else
    return trace;
#endif
  }
  MK_HOST_DEVICE shm::BlockProgress* progress() const {
#if defined(__CUDA_ARCH__)
    return nullptr;
#else
    return shown;
#endif
  }
};

/// Records the failure, if it is the launch's first, and stops the launch's other blocks.
MK_HOST_DEVICE inline void fail_wait(const WaitControl& control, const WaitSite& site, WaitEnd end,
                                     std::uint64_t expected, std::uint64_t seen,
                                     std::uint64_t waited_ns) {
  if (end != WaitEnd::kStopped && shm::compare_exchange(&control.record->claimed, 0u, 1u)) {
    WaitRecord& record = *control.record;
    record.end = end;
    record.site = site;
    record.expected = expected;
    record.seen = seen;
    record.waited_ns = waited_ns;
  }
  // Release: a reader of the stop word sees the record. (The launching thread reads it after all
  // blocks have ended.)
  shm::store_release(control.stop, 1u);
}

/// A wait's site, given as one or as what makes it: a GPU's thread then takes no time for it unless
/// it has to wait.
template <class Site>
MK_HOST_DEVICE inline WaitSite made_site(const Site& site) {
  if constexpr (requires { site(); }) {
    return site();
  } else {
    return site;
  }
}

/// A wait that has looked so often, or at the clock, is told to people. (Where CPUs are few, a
/// pause that yields is a time slice.)
inline constexpr std::uint32_t kToldAfter = 64;
#if defined(__CUDA_ARCH__)
inline constexpr bool kTellsEarly = false;  ///< it looks at the clock as often as that
#else
inline constexpr bool kTellsEarly = true;
#endif

/// Tells people of a wait that lasts. On a GPU by a word that its rank's poller passes on: there is
/// no room for more on this path.
template <class Site>
MK_HOST_DEVICE inline void tell_wait([[maybe_unused]] const WaitControl& control,
                                     [[maybe_unused]] WaitTotals& totals, const Site& site) {
#if defined(__CUDA_ARCH__)
  const WaitSite made = made_site(site);
  shm::store_relaxed(&control.record->awaited[static_cast<std::uint32_t>(made.role)],
                     AwaitedWord::encode(made));
#else
  shm::BlockProgress* const shown = totals.progress();
  if (shown == nullptr) return;
  const WaitSite made = made_site(site);
  shown->wait_for(made.rank, static_cast<std::uint32_t>(made.kind), made.hops);
#endif
}

/// Waits until `probe(&seen)` answers true. `expected` and `seen` are for the record only; `site`:
/// see made_site. The pacer supplies
///     std::uint64_t now_ns();               any monotonic clock
///     bool pause(std::uint32_t attempt);    passes some time, more with each attempt; true: look
///     at the clock and at the stop words now
template <class Pacer, class Site, class Probe>
MK_HOST_DEVICE inline bool wait_until(Pacer& pacer, const WaitControl& control, const Site& site,
                                      WaitTotals& totals, std::uint64_t expected, Probe&& probe) {
  std::uint64_t seen = 0;
  std::uint64_t start_ns = 0;
  std::uint64_t timeout_ns = 0;
  // The probe stands once: on a GPU code that runs for the first time costs more than the look.
  for (std::uint32_t attempt = 0;; ++attempt) {
    const bool look_at_clock = attempt != 0 && pacer.pause(attempt - 1);
    const bool late = look_at_clock && pacer.now_ns() - start_ns > timeout_ns;
    // After the clock: a thread that was not scheduled for long finds the flag before it finds
    // itself late.
    if (probe(&seen)) [[likely]] {
      if (attempt == 0) return true;
      const std::uint64_t end_ns = pacer.now_ns();
      totals.ns += end_ns - start_ns;
      if (shm::BlockProgress* const shown = totals.progress()) shown->go_on();
      if (TraceLog* const log = totals.log()) {
        const WaitSite made = made_site(site);
        const auto kind = static_cast<std::uint32_t>(made.kind);
        log->add({start_ns, end_ns, {kind, made.index[0]}, made.rank, SpanKind::kWait});
      }
      return true;
    }
    if (attempt == 0) {
      start_ns = pacer.now_ns();
      timeout_ns = control.timeout_ns + control.timeout_ns / 4 * made_site(site).hops;
      ++totals.count;
      continue;
    }
    // Not at every look: on a GPU each of these words costs as much time as the flag itself.
    if (!look_at_clock) {
      if (kTellsEarly && attempt == kToldAfter) tell_wait(control, totals, site);
      continue;
    }
    const WaitEnd end = control.stop_reason();
    if (end != WaitEnd::kReached || late) [[unlikely]] {
      const std::uint64_t waited_ns = pacer.now_ns() - start_ns;
      totals.ns += waited_ns;
      fail_wait(control, made_site(site), end != WaitEnd::kReached ? end : WaitEnd::kTimeout,
                expected, seen, waited_ns);
      return false;
    }
    tell_wait(control, totals, site);
  }
}

/// Waits until the flag shows `epoch` or later; what its writer stored before is visible then.
template <class Pacer, class Site>
MK_HOST_DEVICE inline bool wait_flag(Pacer& pacer, const WaitControl& control, const Site& site,
                                     WaitTotals& totals, const std::uint32_t* flag,
                                     std::uint32_t epoch) {
  return wait_until(pacer, control, site, totals, epoch, [&](std::uint64_t* seen) {
    const std::uint32_t value = shm::load_acquire(flag);
    *seen = value;
    return shm::epoch_reached(value, epoch);
  });
}

}  // namespace mk::kernels
