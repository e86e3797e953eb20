#include "daemon/proxy/engine.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "daemon/plant.h"

namespace mk::daemon {

// What changes while the engine runs: the control thread's messages, the links in use, and the end
// of a session. None of it is on the path of a command.

LinkQueue& Engine::use_link(fabric::LinkId id, std::unique_ptr<LinkQueue> fresh) {
  if (id >= links_.size()) links_.resize(std::size_t{id} + 1);
  if (links_[id] == nullptr) {
    links_[id] = std::move(fresh);
    used_links_.push_back(links_[id].get());
  }
  ++links_[id]->users;
  return *links_[id];
}

void Engine::release_links(const Session& session) {
  for (const auto& peer : session.bindings.peers()) {
    LinkQueue* link = peer->link;
    if (--link->users != 0) continue;
    std::erase(used_links_, link);
    links_[link->id()].reset();
  }
}

// -- the control thread's messages
// ----------------------------------------------------------------------------------

bool Engine::read_mail() {
  if (!mailbox_.take(parcels_)) return false;
  for (Parcel& parcel : parcels_) {
    std::visit([&](const auto& message) { on_mail(parcel, message); }, parcel.command);
  }
  parcels_.clear();
  return true;
}

void Engine::on_mail(Parcel& parcel, const AddSession& add) {
  if (!sessions_.add(parcel.session)) {
    on_event_(
        SessionFault{add.slot, ErrorCode::kInternal,
                     fmt::format("session slot {} was added while it is in use, or is not below {}",
                                 add.slot, shm::kSessionsMax)});
    return;
  }
  Session& session = *sessions_.find(add.slot);
  for (Lane& lane : session.lanes)
    lane.cookie_base = Cookie{add.slot, session.generation, lane.index, 0}.pack();
}

void Engine::on_mail(Parcel&, const BindBuffer& bind) {
  if (Session* session = sessions_.find(bind.slot))
    session->bindings.buffers.bind(bind.handle, bind.region, bind.bytes);
}

void Engine::on_mail(Parcel&, const UnbindBuffer& unbind) {
  Session* session = sessions_.find(unbind.slot);
  if (session == nullptr) {
    on_event_(BufferReleased{unbind.slot, unbind.handle});
    return;
  }
  session->unbinding.push_back({unbind});
  session->lanes_marked = 0;
  ++answers_waiting_;
  settle_due_ = true;
}

void Engine::on_mail(Parcel& parcel, const BindPeer& bind) {
  Session* session = sessions_.find(bind.slot);
  if (session == nullptr) return;
  if (bind.peer_rank >= shm::kWorldMax) {
    fault(*session, ErrorCode::kInternal,
          fmt::format("rank {} was bound as a rail peer: ranks are below {}", bind.peer_rank,
                      shm::kWorldMax));
    return;
  }
  LinkQueue& link = use_link(bind.link, std::move(parcel.link));
  link.set_stats(bind.link_stats);
  parcel.peer->link = &link;
  link.start_flow(parcel.peer->flow, session->weight);
  session->bindings.bind_peer(std::move(parcel.peer));
  if (bind.link < dead_links_.size() && dead_links_[bind.link]) {
    fault(*session, ErrorCode::kLinkDown,
          fmt::format("the link to rank {}'s node is down", bind.peer_rank), bind.peer_rank);
  }
}

void Engine::on_mail(Parcel&, const BindPeerBuffer& bind) {
  Session* session = sessions_.find(bind.slot);
  Peer* peer = session != nullptr ? session->bindings.peer(bind.peer_rank) : nullptr;
  if (peer != nullptr) peer->buffers.bind(bind.handle, bind.region, bind.bytes);
}

void Engine::on_mail(Parcel&, const UnbindPeerBuffer& unbind) {
  Session* session = sessions_.find(unbind.slot);
  if (session == nullptr) {
    on_event_(PeerBufferReleased{unbind.slot, unbind.peer_rank, unbind.handle});
    return;
  }
  session->unbinding_peer.push_back({unbind});
  session->lanes_marked = 0;
  ++answers_waiting_;
  settle_due_ = true;
}

void Engine::on_mail(Parcel&, const RetirePeer& retire) {
  Session* session = sessions_.find(retire.slot);
  Peer* peer = session != nullptr ? session->bindings.peer(retire.peer_rank) : nullptr;
  if (peer != nullptr && !MK_PLANT(writes_to_the_departed)) peer->retired = true;
}

void Engine::on_mail(Parcel&, const AdmitPeer& admit) {
  Session* session = sessions_.find(admit.slot);
  if (session == nullptr || admit.node >= session->admitted.size()) return;
  session->admitted[admit.node] = admit.admitted;
}

void Engine::on_mail(Parcel&, const ResetFlags& reset) {
  Session* session = sessions_.find(reset.slot);
  if (session == nullptr) {
    on_event_(FlagsReset{reset.slot, reset.base});
    return;
  }
  session->resetting.push_back(reset);
  ++answers_waiting_;
  settle_due_ = true;
}

void Engine::on_mail(Parcel&, const FenceSession& asked) {
  Session* session = sessions_.find(asked.slot);
  if (session == nullptr) {
    on_event_(Drained{asked.slot});
    return;
  }
  fence(*session);
  if (session->drain_asked) return;
  session->drain_asked = true;
  ++answers_waiting_;
  settle_due_ = true;
}

void Engine::on_mail(Parcel&, const SetShare& share) {
  Session* session = sessions_.find(share.slot);
  if (session == nullptr) return;
  session->set_weight(share.weight);
  session->pacer.set(share.limit);
  for (const auto& peer : session->bindings.peers()) {
    LinkQueue::set_weight(peer->flow, session->weight);
  }
}

// -- the end of a session
// -------------------------------------------------------------------------------------------

void Engine::fault(Session& session, ErrorCode code, std::string reason,
                   std::optional<std::uint32_t> peer_rank) {
  if (session.fenced) return;
  fence(session);
  on_event_(SessionFault{session.slot, code, std::move(reason), peer_rank});
}

void Engine::fence(Session& session) {
  if (session.fenced) return;
  session.fenced = true;
  for (Lane& lane : session.lanes) {
    if (lane.holds) lane.held_entry->state = InFlight::State::kGone;
    lane.holds = false;
  }
  for (const auto& peer : session.bindings.peers()) peer->link->drop(session);
  settle_due_ = settle_due_ || answers_waiting_ != 0;
}

bool Engine::released(Session& session, Unbinding& one) {
  if (!one.unbound) {
    if (!session.taken_to(one.until)) return false;
    session.bindings.buffers.unbind(one.what.handle);
    one.unbound = true;
  }
  if (session.in_flight(one)) return false;
  on_event_(BufferReleased{one.what.slot, one.what.handle});
  return true;
}

bool Engine::released(Session& session, PeerUnbinding& one) {
  Peer* const peer = session.bindings.peer(one.what.peer_rank);
  if (!one.unbound) {
    if (!session.taken_to(one.until)) return false;
    if (peer != nullptr) peer->buffers.unbind(one.what.handle);
    one.unbound = true;
  }
  if (session.in_flight(one)) return false;
  if (peer != nullptr) {
    const fabric::LinkId link = peer->link->id();
    if (!one.shows) one.shows = endpoint_.completed_on(link);
    if (!endpoint_.shown(link, *one.shows)) {
      settle_due_ = true;  // no completion tells of it
      return false;
    }
  }
  on_event_(PeerBufferReleased{one.what.slot, one.what.peer_rank, one.what.handle});
  return true;
}

bool Engine::reset_flags(Session& session, const ResetFlags& reset) {
  // Of a session that ends, nothing is used again.
  if (!session.fenced && session.arrivals.arrivals(reset.base, reset.count) < reset.arrivals) {
    return false;
  }
  session.arrivals.reset(reset.base, reset.count);
  on_event_(FlagsReset{reset.slot, reset.base});
  return true;
}

template <class Waiting, class Done>
bool Engine::answer(std::vector<Waiting>& waiting, std::size_t most, Done done) {
  const auto end = waiting.begin() + static_cast<std::ptrdiff_t>(std::min(most, waiting.size()));
  const auto kept = std::remove_if(waiting.begin(), end, done);
  const auto answered = static_cast<std::uint32_t>(end - kept);
  answers_waiting_ -= answered;
  const auto others = waiting.erase(kept, end);
  if (others == waiting.end()) return false;
  std::rotate(waiting.begin(), others, waiting.end());  // their turn is next
  settle_due_ = true;
  return answered != 0;
}

bool Engine::settle() {
  settle_due_ = false;
  bool more = false;
  for (std::size_t i = sessions_.all().size(); i-- > 0;) {
    Session& session = *sessions_.all()[i];
    std::uint32_t slots_left = kLookAheadMax;
    const bool marked = session.mark(slots_left);
    stats_.looked_ahead.add(kLookAheadMax - slots_left);
    settle_due_ = settle_due_ || !marked;
    const bool in_flight = session.posted != 0 && !MK_PLANT(drains_with_writes_posted);
    // Each asks the session's windows; at the end there is nothing in them.
    const std::size_t most =
        session.drain_asked && !in_flight ? std::numeric_limits<std::size_t>::max() : kAnswersMax;
    more = !marked || more;
    more =
        answer(session.unbinding, most, [&](Unbinding& one) { return released(session, one); }) ||
        more;
    more = answer(session.unbinding_peer, most,
                  [&](PeerUnbinding& one) { return released(session, one); }) ||
           more;
    more = answer(session.resetting, most,
                  [&](const ResetFlags& reset) { return reset_flags(session, reset); }) ||
           more;
    if (!session.drain_asked || in_flight) continue;
    --answers_waiting_;
    release_links(session);
    const SessionSlot slot = session.slot;
    mailbox_.retire(sessions_.remove(slot));
    on_event_(Drained{slot});
  }
  return more;
}

}  // namespace mk::daemon
