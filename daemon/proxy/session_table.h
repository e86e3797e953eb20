/// \file
/// The sessions one proxy serves, by slot. A session is made and freed by the control thread and
/// used only by the proxy thread in between.
#pragma once

#include <algorithm>
#include <array>
#include <bitset>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "daemon/proxy/arrivals.h"
#include "daemon/proxy/bindings.h"
#include "daemon/proxy/command_validation.h"
#include "daemon/proxy/completion_tracker.h"
#include "daemon/proxy/proxy.h"
#include "daemon/proxy/share.h"
#include "daemon/proxy/stats.h"
#include "daemon/proxy/trace.h"
#include "shm/progress.h"
#include "shm/ring.h"

namespace mk::daemon {

struct Session;

/// A session's share; above this it counts as this.
inline constexpr std::uint32_t kWeightMax = 1u << 16;

/// One command ring, as the proxy works on it.
struct Lane {
  Lane(Session& owner, std::uint32_t number, const shm::RingView& ring, LaneStats& lane_stats,
       std::uint32_t window_capacity)
      : consumer{ring},
        session(&owner),
        stats(&lane_stats),
        index(number),
        window(window_capacity) {}

  shm::RingConsumer consumer;
  Session* session;
  LaneStats* stats;
  std::uint32_t index;
  /// A command was copied and checked but its link had no room, or its session no deficit: `held`
  /// is the lane's next.
  bool holds = false;
  AcceptedCommand held;
  InFlight* held_entry = nullptr;
  std::uint64_t held_cookie = 0;
  std::uint64_t cookie_base = 0;      ///< the lane's cookies but for the sequence
  std::uint64_t last_batch = 0;       ///< the last submission that held a command of this lane
  std::uint32_t newly_completed = 0;  ///< done in ring order, not yet published
  std::uint64_t committed = 0;        ///< all below was seen to be, or is taken
  LaneWindow window;

  /// Whether the ring's next command is committed. Reads one word, takes nothing.
  bool ready() const { return is_committed(consumer.consumed); }
  /// Moves `committed` to the first command that is not: by the ring, whatever `produced` says. One
  /// slot each of `slots_left`; false when these did not suffice.
  bool look_ahead(std::uint32_t& slots_left) {
    const std::uint64_t end = consumer.consumed + consumer.ring.slot_count();
    committed = std::max(committed, consumer.consumed);
    for (; committed != end && is_committed(committed); ++committed) {
      if (slots_left == 0) return false;
      --slots_left;
    }
    return true;
  }

 private:
  bool is_committed(std::uint64_t sequence) const {
    const shm::CommandSlot& slot = consumer.ring.slot(sequence);
    return ((shm::load_relaxed(&slot.words[shm::kCommitWord]) ^
             shm::lap_parity(sequence, consumer.ring.slot_count_log2)) &
            shm::kParityBit) == 0;
  }
};

/// How far a session's rings were filled at some moment.
struct RingMark {
  std::array<std::uint64_t, shm::kLanesMax> committed{};
};

/// A handle that goes: first what was committed before is taken, then nothing may name it any more,
/// and when nothing in flight does, the answer is due.
struct Unbinding {
  UnbindBuffer what;
  std::optional<RingMark> until = std::nullopt;  ///< null: not known yet
  bool unbound = false;
};
/// Of a peer's, all that was committed before to any of its flags is completed first, and shows.
struct PeerUnbinding {
  UnbindPeerBuffer what;
  std::optional<RingMark> until = std::nullopt;
  bool unbound = false;
  std::optional<std::uint64_t> shows = std::nullopt;  ///< once completed: how much of the link must
};

struct Session {
  explicit Session(const AddSession& added);

  SessionSlot slot;
  std::uint32_t generation = 0;
  bool fenced = false;       ///< takes nothing more
  bool drain_asked = false;  ///< FenceSession came: answer Drained when `posted` is 0
  std::uint32_t weight = 1;
  Pacer pacer;
  std::uint32_t outstanding = 0;  ///< taken, not completed
  std::uint32_t outstanding_max;
  std::uint32_t posted = 0;     ///< with the fabric
  std::uint32_t next_lane = 0;  ///< whose turn is first in the next pass
  std::vector<Lane> lanes;
  Bindings bindings;
  ArrivalBoard arrivals;
  const shm::Progress* progress;         ///< the client's words
  TracedLaunch traced;                   ///< as the trace has been told last,
  std::uint32_t traced_recording = 0;    ///< in this recording
  std::bitset<shm::kNodesMax> admitted;  ///< nodes that may raise its flags
  std::uint32_t lanes_marked = 0;        ///< since the last unbinding came
  // Not yet answered.
  std::vector<Unbinding> unbinding;
  std::vector<PeerUnbinding> unbinding_peer;
  std::vector<ResetFlags> resetting;

  void set_weight(std::uint32_t wanted) { weight = std::clamp(wanted, 1u, kWeightMax); }

  /// Marks the unbindings that have no mark: what has been taken, and what the client says it has
  /// committed beyond that: one that lies holds its own buffers up. False when `slots_left` did not
  /// suffice: the next call goes on. More that is committed meanwhile counts too.
  bool mark(std::uint32_t& slots_left);
  /// Whether all up to the mark is taken, or nothing more will be.
  bool taken_to(const std::optional<RingMark>& until) const;
  /// Whether a command that was taken and may still be transferred names the buffer, or, of a
  /// peer's, goes to that peer and was committed before the mark.
  bool in_flight(const Unbinding& one) const;
  bool in_flight(const PeerUnbinding& one) const;

 private:
  std::unique_ptr<SessionStats> own_stats_;  ///< when the control thread gave none
};

class SessionTable {
 public:
  /// Null when no session has this slot.
  Session* find(SessionSlot slot) const {
    return slot < shm::kSessionsMax ? sessions_[slot].get() : nullptr;
  }

  /// The session a cookie names, if it is still the one that made it.
  Session* find(const Cookie& cookie) const {
    Session* session = sessions_[cookie.slot].get();
    return session != nullptr && session->generation == cookie.generation ? session : nullptr;
  }

  /// Takes a free slot of the table; false, with `session` untouched, when it is in use or out of
  /// range.
  bool add(std::unique_ptr<Session>& session);
  std::unique_ptr<Session> remove(SessionSlot slot);

  /// All sessions, in no particular order. Invalidated by add and remove.
  std::span<Session* const> all() const { return {active_.data(), count_}; }

 private:
  std::array<std::unique_ptr<Session>, shm::kSessionsMax> sessions_;
  std::array<std::uint32_t, shm::kSessionsMax> generations_{};
  std::array<Session*, shm::kSessionsMax> active_{};
  std::size_t count_ = 0;
};

}  // namespace mk::daemon
