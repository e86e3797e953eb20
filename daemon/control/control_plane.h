/// \file
/// The control plane: clients, sessions, buffer handles, jobs and their rendezvous, links.
/// Single-threaded and free of I/O of its own. Events come in through the `on_*` calls, effects go
/// out through ClientPort, PeerTransport and the proxies' mailboxes. control_loop.h runs it on a
/// thread with real sockets; tests drive it directly.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "daemon/control/ended_jobs.h"
#include "daemon/control/log.h"
#include "daemon/control/operator_totals.h"
#include "daemon/control/peer_transport.h"
#include "daemon/control/progress_watch.h"
#include "daemon/proxy/proxy.h"
#include "shm/host/protocol.h"
#include "shm/host/unix_socket.h"

namespace mk::daemon {

using ClientId = std::uint64_t;

/// How the control plane answers clients. Never blocks.
class ClientPort {
 public:
  virtual ~ClientPort() = default;
  /// Sends a frame; `fds` stay the caller's.
  virtual void send(ClientId client, std::uint16_t type, std::uint64_t request,
                    std::span<const std::byte> payload, std::span<const int> fds) = 0;
  /// Closes the connection after what was sent; no on_client_closed follows.
  virtual void close(ClientId client) = 0;
  /// From now on the end of the client's process counts as a hang-up, even if others hold its
  /// socket. `told`: the pidfd by which it says who it is; invalid when it sent none. The error
  /// says why it is not believed.
  virtual Status watch_process(ClientId client, UniqueFd told) = 0;
  /// Descriptors of connections and of replies on their way: of one user's, or of all.
  virtual std::uint64_t descriptors(std::optional<std::uint32_t> /*uid*/) const { return 0; }
};

struct ControlOptions {
  NodeId node = 0;
  std::string version;
  std::uint64_t generation = 0;   ///< 0: random
  std::uint64_t random_seed = 0;  ///< of the ids it draws; 0: random. For simulators
  std::uint32_t sessions_max = 64;
  std::uint32_t outstanding_max = 256;         ///< per session, commands taken but not completed
  std::uint64_t session_memory_bytes_max = 0;  ///< of the host; 0: no limit
  std::uint64_t heartbeat_interval_ns = 100'000'000;
  /// After a rank has detached in order, the others may stay. An exchange that it cannot join any
  /// more fails them at once. One launch that goes on for as long as this fails them as well, with
  /// kPeerLost: it is most likely waiting for that rank.
  std::uint64_t leave_grace_ns = 10'000'000'000;
  /// Of all sessions of one user together; 0: no limit. Memory is the host's: segments, buffers by
  /// the size of their files however little of it is there, and images of staged GPU memory.
  struct {
    std::uint32_t sessions = 0, buffers = 0, rings = 0;
    std::uint64_t memory_bytes = 0, descriptors = 0;
  } user_max;
  /// Of all users together; 0: no limit.
  struct {
    std::uint64_t memory_bytes = 0, descriptors = 0;
  } all_max;
  /// A job's share of the network, see `refresh_shares`; empty: the default for all.
  std::function<JobShare(const std::string& job)> job_share;
  /// The rails nearest to a GPU, by its PCI address; none: not known. Empty: for all.
  std::function<std::vector<std::uint32_t>(const std::string& gpu)> rails_near;
  /// What the configuration says instead.
  std::map<std::string, std::uint32_t> gpu_rails;
  /// Where a process may run: its CPUs ("0-15,32") and the rails nearest to them; none: no rail is
  /// nearer than others, or not known. Empty: for all. Asked where a rank has no GPU.
  struct ProcessPlace {
    std::string cpus;
    std::vector<std::uint32_t> rails;
    bool configured = false;  ///< by gpu_rails
  };
  std::function<ProcessPlace(std::int32_t pid)> place_of;
  /// How long the totals of an ended job are kept; 0: not at all.
  std::uint64_t ended_jobs_keep_ns = 3'600'000'000'000;
  LogSink log;  ///< may be empty
};

/// A copy of the state for users and tools (Admin service). Counters are read as they stand.
struct QueueInfo {
  std::uint32_t session_id = 0, lane = 0;
  std::string job;
  std::uint32_t rank = 0;
  std::uint64_t depth = 0;                    ///< committed but not yet taken
  std::shared_ptr<const SessionStats> stats;  ///< stays valid after the session is gone
};
struct SessionInfo {
  std::uint32_t session_id = 0, slot = 0;
  std::string job;
  std::uint32_t rank = 0, world = 1, node_rank = 0, nodes = 1, local_rank = 0, local_size = 1;
  std::int32_t pid = 0;
  std::uint32_t uid = 0;
  std::string state;   ///< "waiting" (for ranks), "up", "failed", "draining"
  std::string reason;  ///< why it failed, or what is wrong with it
  std::uint32_t buffers = 0;
  std::uint64_t registered_bytes = 0;
  std::uint64_t attached_for_ns = 0;
  /// SegmentHeader::launches (the client's word), and how long it has been standing as far as seen.
  std::uint64_t launches = 0, launches_for_ns = 0;
  std::uint32_t rail = 0;
  std::string gpu;       ///< PCI address, as far as the client said
  std::string cpus;      ///< ControlOptions::place_of, at attach
  std::string rail_why;  ///< what decided: "nearest to GPU 0000:1b:00.0"
  RankProgress progress;
  std::uint64_t failed_for_ns = 0;  ///< of `recent_failures`: how long ago
};
/// A run of a job with ranks here.
struct JobInfo {
  std::string name;
  std::string state;      ///< "gathering", "connecting", "up", "ending"
  std::string waits_for;  ///< for users; empty when up or ending
  std::uint64_t age_ns = 0;
  std::uint32_t nodes = 1, local_size = 1, node_rank = 0;
  std::vector<std::uint32_t> missing_ranks;
  std::uint32_t weight = 1;
  RateLimit limit;
  std::vector<std::uint32_t> session_ids;  ///< of its ranks here
  std::string held_up;                     ///< held_up_text of these
};
struct LinkInfo {
  std::uint32_t rail = 0;
  NodeId peer = 0;
  std::uint32_t peer_rail = 0;  ///< of the peer; mostly the same as `rail`
  std::string peer_name;
  std::string fabric;
  std::string state;  ///< "connecting", "up", "error"
  std::string reason;
  std::uint64_t state_for_ns = 0;
  std::uint64_t stalled_for_ns = 0;  ///< writes are outstanding, and none has completed for so long
  fabric::LinkId id = 0;             ///< at its endpoint, when up
  std::shared_ptr<const LinkStats> stats;
};
struct ControlSnapshot {
  std::vector<SessionInfo> sessions;
  std::vector<SessionInfo> recent_failures;  ///< the last 32 sessions that ended with an error
  std::vector<QueueInfo> queues;
  std::vector<LinkInfo> links;
  std::vector<JobInfo> jobs;
  bool draining = false;
  /// Since the start, sessions that are gone included.
  std::uint64_t sessions_attached = 0, sessions_failed = 0;
  /// What the lanes of released sessions have counted, added up.
  LaneTotals released;
  std::vector<EndedJob> ended_jobs;  ///< the oldest first
  std::vector<OperatorTotal> operators;
};

/// How much the control plane holds: all but `links_up` is zero when nobody is there.
struct ControlCounts {
  std::size_t clients = 0;
  std::size_t sessions = 0;     ///< not yet released
  std::size_t jobs = 0;         ///< living and ending
  std::size_t early_parts = 0;  ///< of other nodes, offered and not met: waiting for local ranks
  std::size_t slots_used = 0;
  std::size_t links_up = 0;

  friend bool operator==(const ControlCounts&, const ControlCounts&) = default;
};

/// What a daemon with these options and proxies says first to its peers. A `generation` of 0
/// becomes a random one.
PeerHello make_hello(const ControlOptions& options, std::span<Proxy* const> proxies);

class ControlPlane {
 public:
  /// `proxies`: one per rail, index = rail; see rail_choice.h for which one
  /// serves a session.
  /// All outlive this. `hello`: from make_hello, where peers may have had it already.
  ControlPlane(const ControlOptions& options, ClientPort& clients, PeerTransport& peers,
               std::span<Proxy* const> proxies, std::function<std::uint64_t()> now_ns,
               std::optional<PeerHello> hello = std::nullopt);
  ~ControlPlane();

  void on_client_connected(ClientId client, const shm::PeerCredentials& credentials);
  void on_client_frame(ClientId client, shm::Frame frame);
  /// The client hung up or its stream broke: its sessions are fenced, its job's other ranks get
  /// kPeerLost.
  void on_client_closed(ClientId client, const std::string& reason);
  /// Descriptors that sessions hold: of one user's, or of all.
  std::uint64_t descriptors(std::optional<std::uint32_t> uid) const;

  /// What this daemon says first on a new stream to a peer.
  PeerHello hello() const;
  /// A message from `node`; the first of a stream is PeerHello. An error means: break the stream,
  /// with this reason.
  Status on_peer_message(NodeId node, PeerMessage message);
  /// A stream (either direction) to `node` broke.
  void on_peer_down(NodeId node, const std::string& reason);
  /// The transport knows other nodes than before.
  void on_peers_changed();

  void on_proxy_event(std::uint32_t rail, ProxyEvent event);
  /// Heartbeats, rendezvous and exchange deadlines, link reconnection. Call at least every
  /// heartbeat interval.
  void on_tick();
  /// Heartbeats only, and the one call that may come from another thread at any time: they go on
  /// while an event blocks in a connect, and stop when one has not returned for 30 s.
  void beat();

  /// Stops accepting attaches (kDraining); jobs whose local ranks are not all here fail, the others
  /// go on. `reason` follows "the daemon of node N ". `idle` tells when no session is left.
  void drain(const std::string& reason = "is shutting down");
  /// Accepts attaches again.
  void resume();
  bool idle() const;
  /// Fails every session (kDraining or kDaemonLost) before the daemon goes.
  void fail_all(ErrorCode code, const std::string& reason);
  /// Fails a job (kAborted) on all its nodes, as people may ask. Returns how many of its ranks were
  /// here, kNotFound when none was. `reason` may be empty.
  Result<std::uint32_t> terminate_job(const std::string& name, const std::string& reason);

  /// Asks for every job's share again and applies what it finds. Returns how many sessions of `job`
  /// are here.
  std::uint32_t refresh_shares(const std::string& job = "");

  ControlSnapshot snapshot() const;
  ControlCounts counts() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace mk::daemon
