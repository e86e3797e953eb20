/// \file
/// How the proxy thread finds an endpoint's links: by number, or one after the other. The control
/// thread shows them. No lock, nothing allocated; the links are somebody else's.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>

#include "daemon/fabric/fabric.h"
#include "shm/limits.h"

namespace mk::fabric {

/// Links of one endpoint: to every other node, and as many that are being given up.
inline constexpr std::uint32_t kLinksMax = 2 * shm::kNodesMax;

/// The place of a link of that number. Numbers count up, so a place is used again late.
constexpr std::uint32_t link_slot(LinkId id) { return id % kLinksMax; }

/// `L` has its number as `id`.
template <class L>
class LinkSlots {
 public:
  /// Control thread.
  void show(L& link) {
    const std::uint32_t slot = link_slot(link.id);
    slots_[slot].store(&link, std::memory_order_release);
    used_[slot / kBits].fetch_or(bit_of(slot), std::memory_order_release);
  }

  /// Proxy thread: the link, or null.
  L* find(LinkId id) const {
    L* const link = slots_[link_slot(id)].load(std::memory_order_acquire);
    return link != nullptr && link->id == id ? link : nullptr;
  }
  /// Proxy thread. The control thread sees it with what this thread releases next.
  void hide(const L& link) {
    const std::uint32_t slot = link_slot(link.id);
    used_[slot / kBits].fetch_and(~bit_of(slot), std::memory_order_relaxed);
    slots_[slot].store(nullptr, std::memory_order_relaxed);
  }
  /// Proxy thread. Calls `visit(link)` for all, from slot `first` on, round to those before it. It
  /// may hide that link. Answers where to begin the next time, so that each is first in its turn.
  template <class Visit>
  std::uint32_t each(std::uint32_t first, Visit&& visit) const {
    std::uint32_t next = kLinksMax;
    const std::uint64_t before = bit_of(first) - 1;
    for (std::uint32_t i = 0; i <= kWords; ++i) {
      const std::uint32_t word = (first / kBits + i) % kWords;
      std::uint64_t left = used_[word].load(std::memory_order_acquire);
      if (i == 0) left &= ~before;
      if (i == kWords) left &= before;
      for (; left != 0; left &= left - 1) {
        const std::uint32_t slot =
            word * kBits + static_cast<std::uint32_t>(std::countr_zero(left));
        if (next == kLinksMax) next = (slot + 1) % kLinksMax;
        if (L* const link = slots_[slot].load(std::memory_order_acquire)) visit(*link);
      }
    }
    return next % kLinksMax;
  }

 private:
  static constexpr std::uint32_t kBits = 64;
  static constexpr std::uint32_t kWords = kLinksMax / kBits;
  static_assert(kLinksMax % kBits == 0);
  static constexpr std::uint64_t bit_of(std::uint32_t slot) {
    return std::uint64_t{1} << (slot % kBits);
  }

  std::array<std::atomic<L*>, kLinksMax> slots_{};
  std::array<std::atomic<std::uint64_t>, kWords> used_{};
};

}  // namespace mk::fabric
