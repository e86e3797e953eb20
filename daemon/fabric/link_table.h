/// \file
/// The links of one endpoint, shared between the control thread, which adds and gives them up, and
/// the proxy thread, which walks them, without a lock on the data path.
///
/// The control thread owns the objects; the proxy sees them through atomic slots. A link is given
/// up in two steps: control asks (`closing`), the proxy reports what is outstanding, empties the
/// slot and says so (`closed`). Only then may control free the object and use its slot again. A
/// link's number is never used again.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <utility>

#include "daemon/fabric/fabric.h"
#include "daemon/fabric/link_slots.h"

namespace mk::fabric {

/// What every link has; a fabric's link derives from it.
struct LinkBase {
  LinkId id = 0;
  std::atomic<bool> closing{false};  ///< control -> proxy: report what is outstanding, then let go
  std::atomic<bool> closed{false};   ///< proxy -> control: never touched again by the proxy
};

template <class L>
class LinkTable {
 public:
  /// Control thread. Takes the link in under a fresh number and returns it; kLimitExceeded when all
  /// slots are in use.
  Result<L*> add(std::unique_ptr<L> link) {
    for (std::uint32_t tries = 0; tries < kLinksMax; ++tries) {
      const LinkId id = next_++;
      std::unique_ptr<L>& slot = owned_[link_slot(id)];
      if (slot && !slot->closed.load(std::memory_order_acquire)) continue;
      link->id = id;
      slot = std::move(link);
      return slot.get();
    }
    return fail(ErrorCode::kLimitExceeded,
                "this endpoint already has {} links: disconnect some first", kLinksMax);
  }
  /// Control thread. Frees the links that the proxy has let go of, before their slots are needed.
  void sweep() {
    for (std::unique_ptr<L>& slot : owned_) {
      if (slot && slot->closed.load(std::memory_order_acquire)) slot.reset();
    }
  }
  /// Control thread. Shows an added link to the proxy.
  void publish(L& link) { slots_.show(link); }
  /// Control thread: the link, or null when there is none of this number or it was given up.
  L* owned(LinkId id) const {
    L* const link = owned_[link_slot(id)].get();
    return link != nullptr && link->id == id && !link->closing.load(std::memory_order_relaxed)
               ? link
               : nullptr;
  }

  /// Proxy thread: the link, or null.
  L* find(LinkId id) const { return slots_.find(id); }
  /// Proxy thread: LinkSlots::each.
  template <class Visit>
  std::uint32_t each(std::uint32_t first, Visit&& visit) const {
    return slots_.each(first, visit);
  }
  /// Proxy thread: lets go of a link whose last event was reported.
  void release(L& link) {
    slots_.hide(link);
    link.closed.store(true, std::memory_order_release);
  }

 private:
  std::array<std::unique_ptr<L>, kLinksMax> owned_;
  LinkSlots<L> slots_;
  LinkId next_ = 0;
};

/// Writes posted to a link that is gone: taken, and reported as kFailed by the next polls. Proxy
/// thread.
class OrphanQueue {
 public:
  std::size_t take(LinkId link, std::span<const Write> writes) {
    std::size_t taken = 0;
    for (const Write& write : writes) {
      if (tail_ - head_ == ring_.size()) break;
      ring_[tail_++ % ring_.size()] = {link, write.cookie};
      ++taken;
    }
    return taken;
  }
  std::size_t report(std::span<Event> events) {
    std::size_t count = 0;
    while (head_ != tail_ && count < events.size()) {
      const auto& [link, cookie] = ring_[head_++ % ring_.size()];
      events[count++] = {Event::Kind::kFailed, link, cookie, 0, ErrorCode::kLinkDown};
    }
    return count;
  }

 private:
  std::array<std::pair<LinkId, std::uint64_t>, 256> ring_{};
  std::size_t head_ = 0;
  std::size_t tail_ = 0;
};

}  // namespace mk::fabric
