/// \file
/// One rank attached to this daemon: its segment, buffers and flags, and what it may reach at its
/// rail peers. Plain state with few rules of its own; the control plane decides what happens to it.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>

#include "daemon/control/control_plane.h"
#include "daemon/control/heartbeat.h"
#include "daemon/control/link_table.h"
#include "daemon/control/operator_totals.h"
#include "daemon/control/peer_transport.h"
#include "daemon/control/progress_watch.h"
#include "daemon/fabric/fabric.h"
#include "daemon/proxy/stats.h"
#include "shm/host/buffer_file.h"
#include "shm/host/protocol.h"
#include "shm/host/result.h"
#include "shm/host/segment.h"
#include "shm/host/unix_socket.h"
#include "shm/limits.h"

namespace mk::daemon::control {

struct Job;

/// A DeregisterBuffer or a Retire under way: answered when our proxy, all rail peers and, of a
/// Retire, the other local ranks have let the buffer go.
struct BufferWithdrawal {
  std::uint64_t request = 0;
  std::uint64_t deadline_ns =
      ~std::uint64_t{0};  ///< of a Retire, none: other ranks take their time
  /// Retire: ranks that may name the buffer until they retire it, too.
  std::set<std::uint32_t> holders = {};
  bool proxy_released = false;
  bool answered = false;        ///< the deadline passed: the client has its error, the wait goes on
  std::set<NodeId> nodes_left;  ///< those whose daemon has not sent the withdrawal back
  std::uint32_t flag_base = shm::kNoFlags;  ///< flags that go with it
  std::uint32_t flag_count = 0;
  /// Sent to those flags, by all who have sent the withdrawal back; nullopt: somebody did not say.
  std::optional<std::uint64_t> arrivals = 0;
  bool resets_flags = false;  ///< the proxy has been asked to
};

/// A buffer the session registered. `region` goes before the memory it names.
struct Buffer {
  std::string name;
  std::uint64_t bytes = 0;
  std::uint64_t host_bytes = 0;                 ///< memory of the host that it may take
  std::optional<shm::BufferFile> memory;        ///< none: of a GPU, and the client's alone
  std::unique_ptr<fabric::LocalRegion> region;  ///< null: of a GPU, in a job of one node
  std::optional<BufferWithdrawal> withdrawal;
  std::set<std::uint32_t> retired_by = {};  ///< local ranks that will not name it any more
};

/// A rail peer's buffer that this session may write to.
struct PeerBuffer {
  std::unique_ptr<fabric::RemoteRegion> region;  ///< null once `released`
  bool unbinding = false;                        ///< the proxy was told that it goes
  bool released = false;                         ///< the proxy has let it go
  /// The owner wants it back, and is answered when it is released.
  std::optional<RegionWithdraw> withdrawal;
};

/// One rail peer of the session. The regions go before the link they were imported for.
struct PeerBinding {
  std::shared_ptr<Link> link;
  NodeId node = 0;
  std::uint32_t slot = 0;  ///< at its own daemon
  std::uint32_t flag_count = 0;
  std::unique_ptr<fabric::RemoteRegion> flags;  ///< ordered fabrics only
  std::unique_ptr<Counter[]> arrivals_sent;     ///< unordered fabrics: by granule of its flags
  std::map<std::uint16_t, PeerBuffer> buffers;

  bool bound_to(const Link& wanted) const {
    return link.get() == &wanted && (flags != nullptr || arrivals_sent != nullptr);
  }
};

enum class SessionState {
  kWaiting,  ///< for the other ranks of its job
  kUp,
  kLeaving,  ///< detached; what it committed before is still sent
  kFailed,
};

struct Session {
  Session(const shm::Attach& asked, shm::Segment memory)
      : attach(asked), progress(asked.rank), segment(std::move(memory)) {}

  /// Whether it takes part in its job.
  bool active() const { return state == SessionState::kWaiting || state == SessionState::kUp; }
  /// Whether all that its lanes hold has been sent.
  bool rings_done() const;
  /// Whether commands have been completed since the last call.
  bool progresses();
  /// How long the launch that is under way has been seen to be, in nanoseconds; 0: there is none.
  /// It begins with the first call, so that a launch is not older than the question.
  std::uint64_t launch_age(std::uint64_t now_ns);
  /// Notes since when the client's counts have been what they are, for users. Answers what has
  /// passed since the last look. `exchange`: where it waits for other ranks.
  OperatorCounts watch_client(std::uint64_t now_ns, const std::optional<ExchangeWait>& exchange);
  /// For how long the client's process has not run, as far as seen, when that is longer than a
  /// process that runs would stay silent; else 0.
  std::uint64_t silent_ns(std::uint64_t now_ns) const;
  /// Tells the client what its links carry: the slowest that is known to the session, those that
  /// were measured and `limits`, where they are not 0.
  void tell_network_rate(std::initializer_list<double> limits);
  /// A range of arrival flags that nobody has, rounded up to granules, looked for behind the last
  /// one so that a range comes back late; kLimitExceeded when none is long enough.
  Result<std::uint32_t> allocate_flags(std::uint32_t count);
  /// A handle that no buffer has, found in turn so that one comes back as late as possible;
  /// kLimitExceeded when there is none.
  Result<std::uint16_t> free_handle() const;
  void add_buffer(std::uint16_t handle, Buffer buffer);
  void remove_buffer(std::uint16_t handle);
  /// Memory of the host that it may take: its segment, and what its buffers do.
  std::uint64_t host_bytes() const { return segment.bytes() + buffers_host_bytes; }
  /// Its segment's and its buffers'.
  std::uint64_t descriptors() const { return 1 + buffers.size(); }
  /// "rank 3 (node rank 1, pid 77)"
  std::string describe() const;

  // Fixed at attach.
  const shm::Attach attach;
  std::uint32_t id = 0;
  std::uint32_t slot = 0;
  std::uint32_t rail = 0;
  std::string cpus;      ///< that its process might run on when it attached
  std::string rail_why;  ///< SessionInfo::rail_why
  shm::PeerCredentials credentials;
  std::uint64_t attached_ns = 0;
  bool retires = true;  ///< its client says what it will not name any more (ABI 1.3)
  Job* job = nullptr;

  SessionState state = SessionState::kWaiting;
  Error failure;                   ///< when kFailed
  std::optional<ClientId> client;  ///< nullopt: the connection is gone
  bool fenced = false;             ///< the proxy was told
  bool drained = false;            ///< nothing of it is in flight
  std::optional<std::uint64_t> detach_request;
  std::uint64_t leave_deadline_ns = 0;  ///< of kLeaving: when it is fenced with commands left
  std::uint64_t completed_seen = 0;     ///< commands, by `progresses`
  std::uint64_t launches_seen = 0;      ///< SegmentHeader::launches, since `launches_seen_ns`
  std::uint64_t launches_seen_ns = 0;
  std::uint64_t launches_watched = 0;  ///< the same count, since `launches_since_ns`
  std::uint64_t launches_since_ns = 0;
  std::uint64_t beats_watched = 0;  ///< SegmentHeader::beats, since `beats_since_ns`
  std::uint64_t beats_since_ns = 0;
  std::uint64_t watched_ns = 0;  ///< when both were looked at; 0: not yet
  ProgressWatch progress;

  // What it holds; destroyed in reverse order.
  shm::Segment segment;
  HeartbeatTable::Entry heartbeat;
  std::shared_ptr<SessionStats> stats = std::make_shared<SessionStats>();
  std::unique_ptr<fabric::LocalRegion> flags_region;
  std::map<std::uint16_t, Buffer> buffers;     ///< by handle
  std::map<std::uint32_t, PeerBinding> peers;  ///< by rank
  std::uint64_t registered_bytes = 0;          ///< of the host and of GPUs, for users
  std::uint64_t buffers_host_bytes = 0;        ///< see Buffer::host_bytes
  std::uint16_t last_handle = 0;               ///< given out most recently
  struct FlagRange {
    std::uint32_t count = 0;
    bool retiring = false;
  };
  std::map<std::uint32_t, FlagRange> flag_ranges;  ///< given out, by first flag
  std::uint32_t next_flag = 0;                     ///< where to look for the next range
};

}  // namespace mk::daemon::control
