/// \file
/// Whose a receiving queue pair is, for the proxy thread, which sees only its number with an
/// arrival.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "daemon/fabric/fabric.h"
#include "shm/limits.h"

namespace mk::fabric::verbs {

/// One thread adds and removes, another one finds. No lock, nothing allocated.
class SenderTable {
 public:
  /// False when there is no room near its place.
  bool add(std::uint32_t queue, PeerNumber peer) {
    for (std::uint32_t i = 0; i < kWindow; ++i) {
      std::atomic<std::uint32_t>& slot = slots_[(queue + i) % kSlots];
      if (slot.load(std::memory_order_relaxed) != 0) continue;
      slot.store(word(queue, peer), std::memory_order_release);
      return true;
    }
    return false;
  }
  void remove(std::uint32_t queue) {
    for (std::uint32_t i = 0; i < kWindow; ++i) {
      std::atomic<std::uint32_t>& slot = slots_[(queue + i) % kSlots];
      if (slot.load(std::memory_order_relaxed) >> 8 == queue + 1)
        slot.store(0, std::memory_order_relaxed);
    }
  }
  /// Whose it is; kAnyPeer also when it is nobody's any more.
  PeerNumber find(std::uint32_t queue) const {
    for (std::uint32_t i = 0; i < kWindow; ++i) {
      const std::uint32_t there = slots_[(queue + i) % kSlots].load(std::memory_order_acquire);
      if (there >> 8 != queue + 1) continue;
      const PeerNumber peer = there & 0xff;
      return peer < shm::kNodesMax ? peer : kAnyPeer;
    }
    return kAnyPeer;
  }

 private:
  static constexpr std::uint32_t kSlots = 1u << 15;  ///< connections have 8192 queues at most
  static constexpr std::uint32_t kWindow = 16;
  /// Queue pairs' numbers have 24 bits; one more, so that 0 is no entry.
  static std::uint32_t word(std::uint32_t queue, PeerNumber peer) {
    return (queue + 1) << 8 | (peer < shm::kNodesMax ? peer : 0xffu);
  }
  std::array<std::atomic<std::uint32_t>, kSlots> slots_{};
};

}  // namespace mk::fabric::verbs
