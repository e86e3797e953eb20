#include "daemon/fabric/staged/carrier.h"

#include <algorithm>
#include <utility>

namespace mk::fabric::staged {
namespace {

/// A peer that did not answer is not waited for again so long.
constexpr std::chrono::seconds kConnectAgain{5};

}  // namespace

Result<Link*> Carrier::link_to(LinkId outer, PeerNumber peer, const Bytes& address,
                               const std::string& peer_name, std::uint32_t depth) {
  if (Link* const there = owned(outer)) {
    if (there->peer() == address) return there;
    return fail(ErrorCode::kInvalidArgument, "its other GPU buffers are staged elsewhere");
  }
  for (std::unique_ptr<Link>& one : owned_) {
    if (one != nullptr && one->closed.load(std::memory_order_acquire)) one.reset();
  }
  std::unique_ptr<Link>& slot = owned_[link_slot(outer)];
  if (slot != nullptr)
    return fail(ErrorCode::kUnavailable, "an earlier link still has copies under way");
  MK_ASSIGN_OR_RETURN(auto records,
                      shm::BufferFile::create("mkernel-records", depth * sizeof(Record)));
  MK_ASSIGN_OR_RETURN(
      auto region, endpoint_->register_memory({records.data(), records.bytes(), records.fd(), 0}));
  MK_ASSIGN_OR_RETURN(const LinkId over, connect(outer, peer, address, peer_name));
  slot = std::make_unique<Link>(outer, *endpoint_, over, address, depth, std::move(records),
                                std::move(region));
  slots_.show(*slot);
  return slot.get();
}

Result<LinkId> Carrier::connect(LinkId outer, PeerNumber peer, const Bytes& address,
                                const std::string& peer_name) {
  std::optional<Refusal>& refusal = refusals_[link_slot(outer)];
  const auto now = std::chrono::steady_clock::now();
  if (refusal && refusal->outer == outer && now < refusal->until)
    return tl::unexpected<Error>(refusal->error);
  refusal.reset();
  auto over = endpoint_->connect_peer(peer, address, peer_name);
  if (!over && over.error().code == ErrorCode::kTimeout)
    refusal = {outer, std::chrono::steady_clock::now() + kConnectAgain, over.error()};
  return over;
}

void Carrier::disconnect(LinkId outer) {
  Link* const link = owned(outer);
  if (link == nullptr) return;
  endpoint_->disconnect(link->over());
  link->closing.store(true, std::memory_order_release);
}

Link* Carrier::over(LinkId inner) const {
  Link* found = nullptr;
  slots_.each(0, [&](Link& link) {
    if (link.over() == inner) found = &link;
  });
  return found;
}

std::size_t Carrier::post(LinkId outer, std::span<const Write> writes) {
  Link* const link = find(outer);
  return link == nullptr ? orphans_.take(outer, writes) : link->post(writes, copier_, nonce_);
}

void Carrier::take_carried() {
  std::array<Event, 64> events;
  const std::size_t room = std::min(events.size(), receiver_.room());
  if (room == 0) return;
  const std::size_t count = endpoint_->poll(std::span(events).first(room));
  Link* link = nullptr;
  for (std::size_t i = 0; i < count; ++i) {
    const Event& event = events[i];
    if (event.kind == Event::Kind::kArrival) {
      receiver_.arrived(event.immediate, event.peer);
      continue;
    }
    if (event.kind == Event::Kind::kFlushed) {
      receiver_.flushed(event.cookie, event.code);
      continue;
    }
    if (link == nullptr || link->over() != event.link) link = over(event.link);
    if (link == nullptr) continue;
    if (event.kind == Event::Kind::kLinkDown) {
      link->fail(event.code == ErrorCode::kOk ? ErrorCode::kLinkDown : event.code);
    } else {
      link->on_carried(event.cookie, event.kind == Event::Kind::kFailed, event.code);
    }
  }
}

std::size_t Carrier::poll_link(Link& link, std::uint64_t now, std::span<Event> events) {
  const bool closing = link.closing.load(std::memory_order_acquire);
  if (closing) link.fail(ErrorCode::kLinkDown);
  link.progress(copier_, now);
  std::size_t count = link.report(events);
  if (link.failed() && !closing && !link.down_reported && count < events.size()) {
    link.down_reported = true;
    events[count++] = {Event::Kind::kLinkDown, link.id, 0, 0, ErrorCode::kLinkDown};
  }
  if (closing && link.empty()) {
    slots_.hide(link);
    link.closed.store(true, std::memory_order_release);
  }
  return count;
}

std::size_t Carrier::poll(std::span<Event> events) {
  const auto now =
      static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
  take_carried();
  receiver_.flush();
  std::size_t count = orphans_.report(events);
  slots_.each(0, [&](Link& link) { count += poll_link(link, now, events.subspan(count)); });
  count += receiver_.report(now, events.subspan(count));
  copier_.mark();
  return count;
}

}  // namespace mk::fabric::staged
