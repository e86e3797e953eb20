/// \file
/// The proxy engine: one pinned thread per rail that takes commands from its sessions' rings,
/// checks them, groups them by link, posts batches to its endpoint, polls completions and publishes
/// arrivals. It knows nothing of jobs or operators.
///
/// The control thread talks to it through a mailbox (ProxyCommand in, ProxyEvent out). Nothing else
/// is shared but the single-writer counters of stats.h. `Proxy::step` is one pass and can be driven
/// by a test or a simulator without a thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "daemon/fabric/fabric.h"
#include "daemon/proxy/share.h"
#include "daemon/proxy/stats.h"
#include "daemon/proxy/trace.h"
#include "shm/host/result.h"
#include "shm/host/segment.h"

namespace mk::daemon {

/// A session's number at this daemon, 0 .. kSessionsMax-1; reused only after kDrained.
using SessionSlot = std::uint32_t;

// -- control -> proxy
// -----------------------------------------------------------------------------------------------

/// Starts serving a session's rings. `segment` outlives the session here (until Drained).
struct AddSession {
  SessionSlot slot = 0;
  const shm::Segment* segment = nullptr;
  SessionStats* stats = nullptr;        ///< one LaneStats per lane; outlives the session here
  std::uint32_t outstanding_max = 256;  ///< commands taken but not completed, over all lanes
  std::uint32_t weight = 1;             ///< share in the round robin
  RateLimit limit;                      ///< of this session alone
  // Of its job.
  std::uint32_t world = shm::kWorldMax;
  std::uint32_t nodes = shm::kNodesMax;
};
/// Changes what a session may use, from the next command on.
struct SetShare {
  SessionSlot slot = 0;
  std::uint32_t weight = 1;
  RateLimit limit;
};
/// The session is about to have commands. A thread that slept polls then, as after any message.
struct ExpectCommands {
  SessionSlot slot = 0;
};
/// One of the session's own buffers may be a source from now on.
struct BindBuffer {
  SessionSlot slot = 0;
  std::uint16_t handle = 0;
  const fabric::LocalRegion* region = nullptr;
  std::uint64_t bytes = 0;
};
/// The handle is valid for what the session has committed until now. Answered by BufferReleased
/// when all of that is taken and no write in flight names it.
struct UnbindBuffer {
  SessionSlot slot = 0;
  std::uint16_t handle = 0;
};
/// A rail peer of the session: its link and where its flags are.
struct BindPeer {
  SessionSlot slot = 0;
  std::uint16_t peer_rank = 0;
  fabric::LinkId link = 0;
  LinkStats* link_stats = nullptr;
  std::uint32_t peer_slot = 0;  ///< the peer's session slot at its own daemon (immediates)
  const fabric::RemoteRegion* flags = nullptr;  ///< ordered fabrics
  std::uint32_t flag_count = 0;
  /// Unordered fabrics: by granule of the peer's flags, how many writes have been completed;
  /// outlives the session here. Null: nobody asks.
  Counter* arrivals_sent = nullptr;
};
/// The node may raise the session's arrival flags from now on, or no more: it has a part of its
/// job. Matters where arrivals say who wrote (Capabilities::arrivals_named).
struct AdmitPeer {
  SessionSlot slot = 0;
  fabric::PeerNumber node = 0;
  bool admitted = true;
};
/// The rail peer has left in order. Its memory may go at any time: what the session still sends to
/// it goes nowhere, and counts as completed.
struct RetirePeer {
  SessionSlot slot = 0;
  std::uint16_t peer_rank = 0;
};
/// A buffer of a rail peer may be a destination from now on.
struct BindPeerBuffer {
  SessionSlot slot = 0;
  std::uint16_t peer_rank = 0;
  std::uint16_t handle = 0;
  const fabric::RemoteRegion* region = nullptr;
  std::uint64_t bytes = 0;
};
/// The peer's handle is valid for what the session has committed until now. Answered by
/// PeerBufferReleased when all of that, to any flag of the peer, is completed and shows.
struct UnbindPeerBuffer {
  SessionSlot slot = 0;
  std::uint16_t peer_rank = 0;
  std::uint16_t handle = 0;
};
/// Nobody sends to these flags of the session any more: shows 0 in them, once so many arrivals have
/// been published there since the session was added (unordered fabrics), and answers by FlagsReset.
struct ResetFlags {
  SessionSlot slot = 0;
  std::uint32_t base = 0;   ///< a whole granule's first
  std::uint32_t count = 0;  ///< whole granules
  std::uint64_t arrivals = 0;
};
/// Stops taking the session's commands now; answered by Drained when nothing of it is in flight.
struct FenceSession {
  SessionSlot slot = 0;
};
using ProxyCommand =
    std::variant<AddSession, BindBuffer, UnbindBuffer, BindPeer, BindPeerBuffer, UnbindPeerBuffer,
                 RetirePeer, ResetFlags, FenceSession, SetShare, AdmitPeer, ExpectCommands>;

// -- proxy -> control
// -----------------------------------------------------------------------------------------------

/// The session broke a rule or its transfer failed; the proxy has fenced it already.
struct SessionFault {
  SessionSlot slot = 0;
  ErrorCode code = ErrorCode::kInternal;
  std::string reason;
  std::optional<std::uint32_t> peer_rank;  ///< kLinkDown: the rank at the other end of the link
};
struct Drained {
  SessionSlot slot = 0;
};
struct BufferReleased {
  SessionSlot slot = 0;
  std::uint16_t handle = 0;
};
struct PeerBufferReleased {
  SessionSlot slot = 0;
  std::uint16_t peer_rank = 0;
  std::uint16_t handle = 0;
};
struct FlagsReset {
  SessionSlot slot = 0;
  std::uint32_t base = 0;
};
struct LinkDown {
  fabric::LinkId link = 0;
  ErrorCode code = ErrorCode::kLinkDown;
};
using ProxyEvent =
    std::variant<SessionFault, Drained, BufferReleased, PeerBufferReleased, FlagsReset, LinkDown>;

struct ProxyOptions {
  std::uint32_t rail = 0;
  int cpu = -1;                           ///< pin to this CPU; -1: do not pin
  std::uint64_t batch_window_ns = 2'000;  ///< a partial batch waits for company at most this long
  std::uint64_t spin_ns = 50'000;  ///< hot polling after the last work, before sleeping polls begin
  /// The longest sleeping poll of an idle thread; eight times as long after seconds without work.
  /// `apply` wakes it.
  std::uint64_t sleep_ns_max = 500'000;
  /// Every clock reading of the proxy, in ns; empty: CLOCK_MONOTONIC. For tests and simulators that
  /// drive `step`.
  std::function<std::uint64_t()> clock_ns = nullptr;
};

class Proxy {
 public:
  /// `on_event` is called on the proxy thread (or in `step`) and must only hand the event over.
  Proxy(std::unique_ptr<fabric::Endpoint> endpoint, const ProxyOptions& options,
        std::function<void(ProxyEvent)> on_event);
  /// Stops the thread; sessions still added are dropped.
  ~Proxy();

  /// Starts the thread. Without it, drive `step` yourself.
  Status start();
  void stop();

  /// Control thread: hands a command over; it takes effect before the proxy's next pass. Commands
  /// keep their order.
  void apply(ProxyCommand command);

  /// One pass: mailbox, rings, batches, completions. Returns whether it did any work. Only without
  /// `start`.
  bool step();

  fabric::Endpoint& endpoint();
  const ProxyStats& stats() const;
  /// Its reading side, for one thread at a time.
  TraceBuffer& trace();

 private:
  class Core;
  std::unique_ptr<Core> core_;
};

}  // namespace mk::daemon
