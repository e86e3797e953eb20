/// \file
/// The second endpoint, which carries GPUs' data: its links, beside the plain endpoint's, and what
/// has arrived over it.
#pragma once

#include <array>
#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "daemon/fabric/staged/link.h"
#include "daemon/fabric/staged/receiver.h"

namespace mk::fabric::staged {

class Carrier {
 public:
  Carrier(std::unique_ptr<Endpoint> endpoint, GpuCopier& copier,
          std::shared_ptr<RegionTable> regions, std::shared_ptr<FlagTable> flags)
      : endpoint_(std::move(endpoint)),
        copier_(copier),
        receiver_(copier, std::move(regions), std::move(flags),
                  [this](const LocalRegion& region, std::uint64_t cookie) {
                    return endpoint_->flush(region, cookie);
                  }) {}
  ~Carrier() {
    // The GPUs have stopped.
    receiver_.drop_copies();
    for (const auto& link : owned_) {
      if (link != nullptr) link->drop_copies();
    }
  }

  Endpoint& endpoint() { return *endpoint_; }

  // -- control --
  /// The link beside `outer` to the carrier at `address`, made when it is first asked for.
  Result<Link*> link_to(LinkId outer, PeerNumber peer, const Bytes& address,
                        const std::string& peer_name, std::uint32_t depth);
  void disconnect(LinkId outer);
  std::string reason(LinkId outer) const {
    const Link* const link = owned(outer);
    return link == nullptr ? std::string() : endpoint_->link_reason(link->over());
  }

  // -- proxy --
  Link* find(LinkId outer) const { return slots_.find(outer); }
  std::size_t post(LinkId outer, std::span<const Write> writes);
  std::size_t poll(std::span<Event> events);

 private:
  Link* owned(LinkId outer) const {
    Link* const link = owned_[link_slot(outer)].get();
    return link != nullptr && link->id == outer && !link->closing.load(std::memory_order_relaxed)
               ? link
               : nullptr;
  }
  Link* over(LinkId inner) const;
  Result<LinkId> connect(LinkId outer, PeerNumber peer, const Bytes& address,
                         const std::string& peer_name);
  void take_carried();
  std::size_t poll_link(Link& link, std::uint64_t now, std::span<Event> events);

  const std::unique_ptr<Endpoint> endpoint_;
  GpuCopier& copier_;
  Receiver receiver_;
  /// Control thread: why no link could be made beside `outer`, and until when that is believed.
  struct Refusal {
    LinkId outer = 0;
    std::chrono::steady_clock::time_point until{};
    Error error;
  };
  std::array<std::optional<Refusal>, kLinksMax> refusals_;
  // As in LinkTable, but the numbers are the plain endpoint's.
  std::array<std::unique_ptr<Link>, kLinksMax> owned_;
  LinkSlots<Link> slots_;
  OrphanQueue orphans_;     ///< proxy thread
  std::uint8_t nonce_ = 0;  ///< proxy thread
};

}  // namespace mk::fabric::staged
