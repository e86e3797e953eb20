/// \file
/// Whose a receiving queue pair is, for the proxy thread, which sees only its number with an
/// arrival.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "daemon/fabric/fabric.h"

namespace mk::fabric::verbs {

/// One thread adds and removes, another one finds. No lock, nothing allocated.
class SenderTable {
 public:
  /// False when there is no room near its place.
  bool add(std::uint32_t queue, PeerNumber peer) {
    for (std::uint32_t i = 0; i < kWindow; ++i) {
      std::atomic<std::uint64_t>& slot = slots_[(queue + i) % kSlots];
      if (slot.load(std::memory_order_relaxed) != 0) continue;
      slot.store(word(queue, peer), std::memory_order_release);
      return true;
    }
    return false;
  }
  void remove(std::uint32_t queue) {
    for (std::uint32_t i = 0; i < kWindow; ++i) {
      std::atomic<std::uint64_t>& slot = slots_[(queue + i) % kSlots];
      if (queue_of(slot.load(std::memory_order_relaxed)) == queue)
        slot.store(0, std::memory_order_relaxed);
    }
  }
  /// Whose it is; kAnyPeer also when it is nobody's any more.
  PeerNumber find(std::uint32_t queue) const {
    for (std::uint32_t i = 0; i < kWindow; ++i) {
      const std::uint64_t there = slots_[(queue + i) % kSlots].load(std::memory_order_acquire);
      if (queue_of(there) == queue) return static_cast<PeerNumber>(there);
    }
    return kAnyPeer;
  }

 private:
  /// Twice as many as all connections have queues at most: 8 for each of Acceptor's.
  static constexpr std::uint32_t kSlots = 1u << 15;
  static constexpr std::uint32_t kWindow = 16;
  /// The queue's number, and one more, so that 0 is no entry, above the peer's.
  static std::uint64_t word(std::uint32_t queue, PeerNumber peer) {
    return (std::uint64_t{queue} + 1) << 32 | peer;
  }
  /// UINT64_MAX of no entry: no queue's number.
  static std::uint64_t queue_of(std::uint64_t word) { return (word >> 32) - 1; }
  std::array<std::atomic<std::uint64_t>, kSlots> slots_{};
};

}  // namespace mk::fabric::verbs
