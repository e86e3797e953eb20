#include "daemon/proxy/session_table.h"

#include <algorithm>

namespace mk::daemon {

namespace {

/// A lane's window has room for twice the session's outstanding commands: those completed behind a
/// straggler wait there too.
std::uint32_t window_capacity(std::uint32_t outstanding_max) {
  return 2 * std::clamp(outstanding_max, 1u, shm::kRingSlotsMax);
}

/// `names(lane, entry, sequence)`, of those that the fabric may still touch the memory of.
template <class Names>
bool any_in_flight(const Session& session, Names names) {
  if (session.fenced && session.posted == 0) return false;
  bool found = false;
  for (const Lane& lane : session.lanes) {
    lane.window.for_each([&](const InFlight& entry, std::uint32_t sequence) {
      found = found || (entry.pending() && names(lane, entry, sequence));
    });
  }
  return found;
}

}  // namespace

Session::Session(const AddSession& added)
    : slot(added.slot),
      outstanding_max(std::clamp(added.outstanding_max, 1u, shm::kRingSlotsMax)),
      bindings(added.world, added.nodes),
      arrivals(added.segment->flags(), added.segment->shape().flag_count),
      progress(&added.segment->header().progress),
      own_stats_(added.stats == nullptr ? std::make_unique<SessionStats>() : nullptr) {
  set_weight(added.weight);
  pacer.set(added.limit);
  SessionStats& stats = added.stats != nullptr ? *added.stats : *own_stats_;
  const std::uint32_t lane_count = added.segment->shape().lane_count;
  lanes.reserve(lane_count);
  for (std::uint32_t i = 0; i < lane_count; ++i) {
    lanes.emplace_back(*this, i, added.segment->ring(i), stats.lanes[i],
                       window_capacity(outstanding_max));
  }
  unbinding.reserve(16);
  unbinding_peer.reserve(16);
  resetting.reserve(16);
}

bool Session::mark(std::uint32_t& slots_left) {
  if (fenced || lanes_marked == lanes.size()) return true;
  for (; lanes_marked != lanes.size(); ++lanes_marked) {
    if (!lanes[lanes_marked].look_ahead(slots_left)) return false;
  }
  RingMark mark;
  for (const Lane& lane : lanes) mark.committed[lane.index] = lane.committed;
  const auto give = [&](auto& waiting) {
    for (auto& one : waiting) {
      if (!one.until) one.until = mark;
    }
  };
  give(unbinding);
  give(unbinding_peer);
  return true;
}

bool Session::taken_to(const std::optional<RingMark>& until) const {
  return fenced || (until && std::ranges::all_of(lanes, [&](const Lane& lane) {
                      return lane.consumer.consumed >= until->committed[lane.index];
                    }));
}

bool Session::in_flight(const Unbinding& one) const {
  return any_in_flight(*this, [&](const Lane&, const InFlight& entry, std::uint32_t) {
    return entry.src_handle == one.what.handle;
  });
}

bool Session::in_flight(const PeerUnbinding& one) const {
  return any_in_flight(*this, [&](const Lane& lane, const InFlight& entry, std::uint32_t sequence) {
    // Without a mark the session was fenced: nothing comes after what it has taken.
    const auto mark = static_cast<std::uint32_t>(one.until ? one.until->committed[lane.index] : 0);
    const bool before = !one.until || static_cast<std::int32_t>(sequence - mark) < 0;
    return entry.peer->rank == one.what.peer_rank &&
           (before || entry.dst_handle == one.what.handle);
  });
}

bool SessionTable::add(std::unique_ptr<Session>& session) {
  const SessionSlot slot = session->slot;
  if (slot >= shm::kSessionsMax || sessions_[slot] != nullptr) return false;
  session->generation = ++generations_[slot] & Cookie::kGenerationMask;
  active_[count_++] = session.get();
  sessions_[slot] = std::move(session);
  return true;
}

std::unique_ptr<Session> SessionTable::remove(SessionSlot slot) {
  Session* session = find(slot);
  if (session == nullptr) return nullptr;
  const auto end = active_.begin() + static_cast<std::ptrdiff_t>(count_);
  *std::find(active_.begin(), end, session) = active_[--count_];
  return std::move(sessions_[slot]);
}

}  // namespace mk::daemon
