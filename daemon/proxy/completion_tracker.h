/// \file
/// From a completion back to its command, and from completions in any order to counters in ring
/// order.
#pragma once

#include <bit>
#include <cassert>
#include <cstdint>
#include <memory>

#include "daemon/plant.h"
#include "shm/limits.h"

namespace mk::daemon {

struct Peer;

/// What travels with a write as its cookie: session slot, the slot's generation, lane and the low
/// bits of the command's number. A completion that arrives after its session is gone, or twice,
/// names nothing any more and is only counted.
struct Cookie {
  static constexpr unsigned kSequenceBits = 32;
  static constexpr unsigned kLaneBits = 4;
  static constexpr unsigned kSlotBits = 6;
  static constexpr unsigned kGenerationBits = 64 - kSequenceBits - kLaneBits - kSlotBits;
  static constexpr std::uint32_t kGenerationMask = (1u << kGenerationBits) - 1;

  std::uint32_t slot = 0;
  std::uint32_t generation = 0;
  std::uint32_t lane = 0;
  std::uint32_t sequence = 0;

  friend constexpr bool operator==(const Cookie&, const Cookie&) = default;

  constexpr std::uint64_t pack() const {
    return std::uint64_t{generation & kGenerationMask} << (kSequenceBits + kLaneBits + kSlotBits) |
           std::uint64_t{slot} << (kSequenceBits + kLaneBits) |
           std::uint64_t{lane} << kSequenceBits | sequence;
  }
  static constexpr Cookie unpack(std::uint64_t packed) {
    return Cookie{
        static_cast<std::uint32_t>(packed >> (kSequenceBits + kLaneBits)) & ((1u << kSlotBits) - 1),
        static_cast<std::uint32_t>(packed >> (kSequenceBits + kLaneBits + kSlotBits)) &
            kGenerationMask,
        static_cast<std::uint32_t>(packed >> kSequenceBits) & ((1u << kLaneBits) - 1),
        static_cast<std::uint32_t>(packed)};
  }
};
static_assert(shm::kSessionsMax <= 1u << Cookie::kSlotBits);
static_assert(shm::kLanesMax <= 1u << Cookie::kLaneBits);

/// A command between its ring and its completion.
struct InFlight {
  enum class State : std::uint8_t {
    kTaken,      ///< copied out of the ring, not yet posted
    kPosted,     ///< with the fabric
    kCompleted,  ///< done, but one before it is not
    kGone,       ///< failed or dropped: never done
  };
  std::uint64_t posted_ns = 0;
  Peer* peer = nullptr;
  std::uint16_t src_handle = 0;
  std::uint16_t dst_handle = 0;
  std::uint16_t granule = 0;  ///< of the peer's flags
  State state = State::kTaken;

  /// Whether the fabric may still touch its memory, now or once it is posted.
  bool pending() const { return state == State::kTaken || state == State::kPosted; }
};

/// The commands of one lane from the oldest not completed to the newest taken: a ring of fixed
/// size, in ring order.
class LaneWindow {
 public:
  /// Room for `capacity` commands, rounded up to a power of two.
  explicit LaneWindow(std::uint32_t capacity)
      : mask_(std::bit_ceil(capacity) - 1),
        entries_(std::make_unique<InFlight[]>(std::size_t{mask_} + 1)) {}

  std::uint32_t capacity() const { return mask_ + 1; }
  std::uint32_t count() const { return tail_ - head_; }
  bool full() const { return count() > mask_; }

  /// The next command of the lane, in state kTaken. Not when full.
  InFlight& open() {
    assert(!full());
    InFlight& entry = entries_[tail_++ & mask_];
    entry.state = InFlight::State::kTaken;
    return entry;
  }

  /// The command with this number, if it is with the fabric now; null for one never posted, or
  /// completed already.
  InFlight* find_posted(std::uint32_t sequence) {
    if (sequence - head_ >= count()) return nullptr;
    InFlight& entry = entries_[sequence & mask_];
    return entry.state == InFlight::State::kPosted ? &entry : nullptr;
  }

  /// Marks a posted command done; returns how many more are now done in ring order.
  std::uint32_t complete(InFlight& entry) {
    entry.state = InFlight::State::kCompleted;
    const std::uint32_t before = head_;
    while (head_ != tail_ && entries_[head_ & mask_].state == InFlight::State::kCompleted) ++head_;
    if (MK_PLANT(completes_out_of_order)) return 1;
    return head_ - before;
  }

  /// Calls `visit(command, its number)` for every command in the window, oldest first.
  template <class Visit>
  void for_each(Visit visit) const {
    for (std::uint32_t at = head_; at != tail_; ++at) visit(entries_[at & mask_], at);
  }

 private:
  // Numbers of commands, low 32 bits: the first command of a ring is number 0, so they agree with
  // the cookies.
  std::uint32_t head_ = 0;
  std::uint32_t tail_ = 0;
  std::uint32_t mask_;
  std::unique_ptr<InFlight[]> entries_;
};

}  // namespace mk::daemon
