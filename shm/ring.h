/// \file
/// The command ring: single producer (one send block), single consumer (one proxy thread). The two
/// sides are separate plain structs over the same memory; either may live in another process or on
/// a GPU.
#pragma once

#include <cstdint>

#include "shm/atomic.h"
#include "shm/command.h"
#include "shm/layout.h"

namespace mk::shm {

/// A ring in mapped memory. Copyable; owns nothing.
struct RingView {
  CommandSlot* slots = nullptr;
  LaneControl* control = nullptr;
  std::uint32_t slot_count_log2 = 0;

  MK_HOST_DEVICE constexpr std::uint64_t slot_count() const { return 1ull << slot_count_log2; }
  MK_HOST_DEVICE constexpr CommandSlot& slot(std::uint64_t sequence) const {
    return slots[sequence & (slot_count() - 1)];
  }
};

/// The producer's side. Used by one thread at a time; `produced` continues over launches and never
/// restarts.
struct RingProducer {
  RingView ring;
  std::uint64_t produced = 0;  ///< sequence of the next command
  std::uint64_t consumed_seen =
      0;  ///< the last `consumed` read: saves a read of the daemon's line per command

  /// Whether a command can be written now.
  MK_HOST_DEVICE bool has_credit() { return has_credits(1); }

  /// Writes and commits one command; returns false, with nothing written, when the ring is full.
  MK_HOST_DEVICE bool try_push(const Command& command) {
    if (!has_credit()) return false;
    write(0, command);
    commit(1);
    return true;
  }

  /// Whether `count` commands can be written now. Reads the daemon's counter only when the cached
  /// credits do not do.
  MK_HOST_DEVICE bool has_credits(std::uint64_t count) {
    if (produced + count - consumed_seen <= ring.slot_count()) return true;
    // Acquire: the daemon's reads of the slots happened before it counted them as consumed.
    consumed_seen = load_acquire(&ring.control->consumed);
    return produced + count - consumed_seen <= ring.slot_count();
  }

  // In two steps: what a command says may be known before what it names is there. There must be
  // credits for all that are written and not committed.

  /// Words 0..4 of the `ahead`-th command from now on. The consumer sees nothing of it.
  MK_HOST_DEVICE void write(std::uint64_t ahead, const Command& command) const {
    encode(command, ring.slot(produced + ahead).words);
  }
  /// Puts the time into a command that has been written.
  MK_HOST_DEVICE void stamp(std::uint64_t ahead, std::uint32_t commit_time_ns) const {
    std::uint64_t& word = ring.slot(produced + ahead).words[kEpochWord];
    word = (word & 0xffffffffu) | static_cast<std::uint64_t>(commit_time_ns) << 32;
  }
  /// Commits the next `count` commands, which have been written: the first one last, so that the
  /// consumer finds all of them as soon as any. Release: words 0..4 of each, and the payload it
  /// names, are visible before.
  MK_HOST_DEVICE void commit(std::uint64_t count) {
    store_release_back(
        count, [this](std::uint64_t i) { return &ring.slot(produced + i).words[kCommitWord]; },
        [this](std::uint64_t i) { return commit_word(produced + i, ring.slot_count_log2); });
    produced += count;
    store_relaxed(&ring.control->produced, produced);
  }

  /// Commands whose source bytes may be reused, counted like `produced`. Acquire: those bytes were
  /// read before.
  MK_HOST_DEVICE std::uint64_t completed() const { return load_acquire(&ring.control->completed); }
};

/// The consumer's side (the daemon). Treats the slots as hostile: it copies a slot once and looks
/// only at the copy.
struct RingConsumer {
  RingView ring;
  std::uint64_t consumed = 0;   ///< kept here, never read back from shared memory
  std::uint64_t completed = 0;  ///< likewise

  /// Copies the next command if it is committed. Returns false when the ring is empty. The slot
  /// stays taken until `publish_consumed`.
  bool try_take(std::uint64_t words[kCommandWords]) {
    CommandSlot& slot = ring.slot(consumed);
    const std::uint64_t commit = load_acquire(&slot.words[kCommitWord]);
    if ((commit & kParityBit) != lap_parity(consumed, ring.slot_count_log2)) return false;
    // Relaxed atomic loads: a hostile producer may write these words meanwhile; each is read once
    // and checked later.
    for (std::uint32_t i = 0; i < kCommitWord; ++i) words[i] = load_relaxed(&slot.words[i]);
    words[kCommitWord] = commit;
    ++consumed;
    return true;
  }

  /// Whether `words`, as returned by the last `try_take`, carries that command's own sequence.
  bool sequence_matches(const std::uint64_t words[kCommandWords]) const {
    return static_cast<std::uint32_t>(words[kCommitWord]) ==
           static_cast<std::uint32_t>(consumed - 1);
  }

  /// Gives the slots of all taken commands back. Release: the copies were made before.
  void publish_consumed() { store_release(&ring.control->consumed, consumed); }

  /// Counts `count` more commands whose source bytes may be reused, in ring order.
  void publish_completed(std::uint64_t count) {
    completed += count;
    store_release(&ring.control->completed, completed);
  }
};

}  // namespace mk::shm
