/// \file
/// The inside of ControlPlane. Its methods are spread over files by subject:
///
///   control_plane.cc    the outside: events in, tick, drain
///   inspect.cc          what people and tools see
///   client_messages.cc  what a client may ask when, and the requests of an attached session
///   attach.cc           a rank joins
///   quota.cc            what a session, a user and all of them may hold
///   rendezvous.cc       a job comes up: parts, links, bindings
///   peer_messages.cc    what other daemons say
///   withdrawal.cc       buffers and flags come back: when nobody may name them any more
///   teardown.cc         sessions and jobs end, memory and slots come back
///
/// Nothing is destroyed in the middle of an event: sessions and jobs are marked, and `reap` takes
/// them at its end.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/control/control_plane.h"
#include "daemon/control/heartbeat.h"
#include "daemon/control/job.h"
#include "daemon/control/job_secret.h"
#include "daemon/control/link_table.h"
#include "daemon/control/rail_choice.h"
#include "daemon/control/session.h"
#include "daemon/control/source_line.h"

namespace mk::daemon::control {

/// One connection.
struct Client {
  enum class State {
    kConnected,  ///< has not said hello
    kGreeted,
    kAttached,  ///< its session is alive
    kLeaving,   ///< it has asked to detach
    kEnded,     ///< its session has failed
  };
  ClientId id = 0;
  shm::PeerCredentials credentials;
  State state = State::kConnected;
  std::uint16_t abi_minor = 0;  ///< from its hello
  Session* session = nullptr;   ///< null also when it has failed and is released
  Error failure;                ///< when kEnded
};

/// Another daemon.
struct PeerState {
  struct Offer {
    JobOffer offer;
    std::uint64_t received_ns = 0;
    std::optional<JobProof> proof;  ///< the last that came for it
    bool met = false;               ///< a job here has answered it
  };
  bool up = false;
  PeerHello hello;                      ///< while up
  std::string down_reason;              ///< while not up
  std::map<std::string, Offer> offers;  ///< by job, until the part ends or is not offered any more
};

}  // namespace mk::daemon::control

namespace mk::daemon {

/// A session that leaves is fenced, with commands left, when the network has taken none of them for
/// so long.
inline constexpr std::uint64_t kLeavingStallNs = 4'000'000'000;

/// A slot rests for so long when another daemon has not said that nothing of its own is in flight:
/// an immediate names the slot, not the session. It may be sent again for as long as the sender's
/// `write_timeout_ns`, and that daemon may miss ours later than ours misses it.
inline constexpr std::uint64_t kSlotRestNs = 45'000'000'000;

/// After waits of so long for peers, an event begins no other: other jobs' requests come first. One
/// wait alone may last as long as the endpoint's `connect_timeout_ns`.
inline constexpr std::uint64_t kWaitNsMax = 200'000'000;

// The proxy has sessions, too: what is the control plane's own lives in a namespace of its own.
using namespace control;

class ControlPlane::Impl {
 public:
  Impl(const ControlOptions& options, ClientPort& clients, PeerTransport& peers,
       std::span<Proxy* const> proxies, std::function<std::uint64_t()> now_ns, PeerHello hello);

  // control_plane.cc
  void client_connected(ClientId client, const shm::PeerCredentials& credentials);
  void client_closed(ClientId client, const std::string& reason);
  void proxy_event(std::uint32_t rail, ProxyEvent event);
  void tick();
  void drain(const std::string& reason);
  void resume();
  void fail_all(ErrorCode code, const std::string& reason);
  bool idle() const { return sessions_.empty(); }
  Result<std::uint32_t> terminate_job(const std::string& name, const std::string& reason);

  // inspect.cc
  std::uint32_t refresh_shares(const std::string& job);
  ControlSnapshot snapshot() const;
  ControlCounts counts() const;

  // control_plane.cc
  const PeerHello& hello() const { return hello_; }
  /// Thread-safe.
  void beat() { heartbeats_.beat(now_()); }

  // quota.cc
  std::uint64_t session_descriptors(std::optional<std::uint32_t> uid) const;

  // client_messages.cc
  void client_frame(ClientId client, shm::Frame frame);

  // peer_messages.cc
  Status peer_message(NodeId node, PeerMessage message);
  void peer_down(NodeId node, const std::string& reason);
  void peers_changed();

  /// Destroys what has ended, and notes that the control thread lives: the last thing every event
  /// does.
  void reap();

 private:
  // client_messages.cc
  struct Handler;
  static std::span<const Handler> handlers();
  /// Decodes the payload and calls the method; a malformed one ends the connection.
  template <class Message, void (Impl::*Method)(Client&, std::uint64_t, Message&, shm::Frame&)>
  void run(Client& client, shm::Frame& frame);
  void hello_from(Client& client, std::uint64_t request, shm::Hello& hello, shm::Frame&);
  void register_buffer(Client& client, std::uint64_t request, shm::RegisterBuffer& message,
                       shm::Frame& frame);
  void register_device_buffer(Client& client, std::uint64_t request,
                              shm::RegisterDeviceBuffer& message, shm::Frame&);
  void register_dmabuf(Client& client, std::uint64_t request, shm::RegisterDmabuf& message,
                       shm::Frame& frame);
  void answer_registration(Client& client, std::uint64_t request,
                           const Result<std::uint16_t>& handle);
  Status check_buffer(const Session& session, const std::string& name, std::uint64_t bytes) const;
  Result<std::uint16_t> register_device_buffer_for(Session& session,
                                                   shm::RegisterDeviceBuffer& message,
                                                   UniqueFd dmabuf, std::uint64_t dmabuf_offset);
  Result<std::uint16_t> register_buffer_for(Session& session, shm::RegisterBuffer& message,
                                            UniqueFd fd);
  void alloc_flags(Client& client, std::uint64_t request, shm::AllocFlags& message, shm::Frame&);
  void exchange(Client& client, std::uint64_t request, shm::Exchange& message, shm::Frame&);
  void open_peer_buffer(Client& client, std::uint64_t request, shm::OpenPeerBuffer& message,
                        shm::Frame&);
  void detach(Client& client, std::uint64_t request, shm::Detach&, shm::Frame&);
  void answer_exchanges(Job& job);
  /// Answers what the session still waits for, since it ends.
  void abort_requests(Session& session, const Error& error);
  template <class Message>
  void reply(ClientId client, std::uint64_t request, const Message& message,
             std::span<const int> fds = {}) {
    clients_port_.send(client, static_cast<std::uint16_t>(Message::kType), request,
                       shm::encode_message(message), fds);
  }
  void reply_error(ClientId client, std::uint64_t request, const Error& error);
  /// Answers with the error and closes; a session it has fails.
  void refuse(Client& client, std::uint64_t request, const Error& error);

  // attach.cc
  void attach(Client& client, std::uint64_t request, shm::Attach& message, shm::Frame&);
  Status check_attach(const shm::Attach& attach) const;
  Status check_join(const Job& job, const shm::Attach& attach, const Client& client) const;
  Status check_user(std::uint32_t uid, const shm::Attach& attach) const;

  // quota.cc
  /// What the sessions of one user, or of all, have together.
  struct Usage {
    std::uint32_t sessions = 0, rings = 0;
    std::uint64_t buffers = 0, host_bytes = 0;
    std::uint64_t descriptors = 0;  ///< connections and replies on their way included
  };
  Usage usage_of(std::optional<std::uint32_t> uid) const;
  /// Whether a user may have `bytes` more of the host's memory. `what` begins the error.
  Status check_memory(std::uint32_t uid, std::uint64_t bytes, const std::string& what) const;
  /// Whether a user may have `count` more descriptors.
  Status check_descriptors(std::uint32_t uid, std::uint64_t count, const std::string& what) const;
  Status check_buffer_count(const Session& session, const std::string& name) const;
  /// Whether the session's user may have one more GPU buffer on its rail: three quarters of what
  /// the fabric takes, so that something is left for others.
  Status check_gpu_buffers(const Session& session, const std::string& name) const;
  /// Whether `session` may have `bytes` more of the host's memory.
  Status check_session_memory(const Session& session, std::uint64_t bytes,
                              const std::string& what) const;
  /// The share of one of the job's ranks here.
  JobShare session_share(const Job& job) const;
  /// For a new session.
  Result<std::uint32_t> find_slot() const;
  Result<Session*> create_session(Client& client, const shm::Attach& attach);

  // rendezvous.cc
  /// Takes the job as far towards kUp as it goes now.
  void advance(Job& job);
  /// The link, connected if it is not; null when that fails or has to wait. Only to a node that is
  /// up.
  std::shared_ptr<Link> link_to(const LinkKey& key);
  /// Whether this event may still wait for peers; else the next tick goes on.
  bool may_wait() const { return waited_ns_ < kWaitNsMax; }
  /// Calls what may block until a peer answers.
  template <class Call>
  auto wait_for(Call call) {
    const std::uint64_t begin_ns = now_();
    auto result = call();
    waited_ns_ += now_() - begin_ns;
    return result;
  }
  /// Of a session that is to be; `job` is null where it is the job's first here.
  /// `near`: to the rank's GPU or CPUs; none: not known.
  Result<control::RailChoice> choose_rail(const shm::Attach& attach, const Job* job,
                                          std::span<const std::uint32_t> near) const;
  /// "rail 0 to node 1 (b:7000)", with the rail there where it is another.
  std::string describe_link(const LinkKey& key) const;
  /// By which the session writes to its rail peer there.
  static LinkKey link_key(const Session& session, const RemotePart& part);
  /// Connects a link in error that no job waits for.
  void retry_links();
  bool bind(Job& job);
  /// Takes back what `bind` did of the node's part; before the job is up.
  void unbind(Job& job, NodeId node);
  Status bind_session(Session& session, const RemotePart& part, std::shared_ptr<Link> link);
  /// Lets the session's commands name its rail peers.
  void open_peers(Session& session);
  /// Binds the buffers that were announced before the job was up, then takes the blobs.
  void bind_waiting_regions(Job& job);
  void job_up(Job& job);
  void announce_buffer(Session& session, std::uint16_t handle);
  /// Sends to every node of the job; a node that cannot be reached fails the job.
  void send_to_job(Job& job, const PeerMessage& message);
  void send_to_part(Job& job, const RemotePart& part, const PeerMessage& message);
  Error rendezvous_timeout(const Job& job) const;
  /// Why the job is not up yet, each reason led by "; "; `missing`: the ranks nobody has heard of.
  std::string obstacles(const Job& job, std::vector<std::uint32_t>& missing) const;

  // handshake.cc
  /// Offers the job's part to all nodes that do not have the offer.
  void announce(Job& job);
  /// Answers the node's offer of the job with our proof, when it is this job's.
  void meet(Job& job, NodeId node);
  void meet_all(Job& job);
  /// Gives the node our part when its proof has come and is right; a part that does not fit then
  /// fails the job.
  void check_proof(Job& job, NodeId node);
  ProofParty own_side(const Job& job) const;
  /// Offers that no job here has answered.
  std::size_t offers_waiting() const;
  Bytes make_nonce();
  Status on(NodeId node, JobOffer& offer);
  Status on(NodeId node, JobProof& proof);
  Status on(NodeId node, JobPart& part);

  // peer_messages.cc
  Status on(NodeId node, PeerHello& hello);
  Status on(NodeId node, JobReady& ready);
  Status on(NodeId node, RegionAnnounce& region);
  Status on(NodeId node, RegionWithdraw& region);
  Status on(NodeId node, ExchangePart& exchange);
  Status on(NodeId node, JobLeft& left);
  Status on(NodeId node, RailMoved& moved);
  Status check_hello(NodeId node, const PeerHello& hello) const;
  /// Tells all nodes of the rails whose endpoints have got another address.
  void tell_rails();
  void tell_rail(NodeId node, std::uint32_t rail);
  /// The job that has taken this part of `node`; null when it is unknown (it has ended here). The
  /// newest, since a part that an ended job had taken may be the next one's: its daemon announces
  /// it again when it has bound nothing yet.
  Job* job_with(NodeId node, std::uint64_t part_id, RemotePart*& part);
  /// One of the parts of `job` has come to an end.
  void part_left(Job& job, RemotePart& part, const JobLeft& left);
  /// The part was of a run before this one: waits for that node's next.
  void forget_part(Job& job, const RemotePart& part);
  Status bind_peer_buffer(Job& job, const RemotePart& part, const RegionAnnounce& region);

  // withdrawal.cc
  void deregister_buffer(Client& client, std::uint64_t request, shm::DeregisterBuffer& message,
                         shm::Frame&);
  void retire(Client& client, std::uint64_t request, shm::Retire& message, shm::Frame&);
  void launch_begins(Client& client, std::uint64_t request, shm::LaunchBegins&, shm::Frame&);
  /// One of the session's own buffers goes.
  void withdraw(Session& session, std::uint16_t handle, BufferWithdrawal withdrawal);
  /// The handle's withdrawal has come a step further: finishes it when nobody is left.
  void advance_withdrawal(Session& session, std::uint16_t handle);
  void advance_withdrawals(Job& job);
  /// Whether this rank of the job may still name the buffer, which is being withdrawn.
  static bool may_hold(const Session& session, const Buffer& buffer);
  /// Whether another local rank may still name the buffer, which is being withdrawn.
  bool held_here(const Session& owner, const Buffer& buffer) const;
  /// The session will not name this buffer of another rank any more.
  void retire_peer_buffer(Session& session, const shm::Retire::PeerBuffer& named);
  /// The session will name no buffer of others any more.
  void retire_all(Session& session);
  void unbind_peer_buffer(Session& session, std::uint32_t peer_rank, std::uint16_t handle);
  /// The proxy has let it go: its owner may have it back.
  void on_peer_buffer_released(Session& session, std::uint32_t peer_rank, std::uint16_t handle);
  void on_flags_reset(Session& session, std::uint32_t base);
  void send_back(Session& session, std::uint32_t peer_rank, std::uint16_t handle);
  /// A drained session holds no peer's buffer back.
  void release_withdrawn(Session& session);

  // teardown.cc
  /// Why a job fails, as told to the others: which rank it was, what happened.
  struct Cause {
    std::uint32_t rank = 0;
    ErrorCode code = ErrorCode::kPeerLost;
    std::string text;
  };
  /// The session's own fault: it gets `error`, the other ranks of its job kPeerLost.
  void fail_session(Session& session, const Error& error);
  /// Every active session of the job gets `error`; the other nodes are told `cause`.
  void fail_job(Job& job, const Error& error, const Cause& cause,
                LogLevel level = LogLevel::kError);
  /// Tells all who have our part how it ended.
  void tell_left(Job& job, std::uint32_t rank, ErrorCode code, const std::string& text);
  /// The error of ranks that lost another one: names rank, node and what happened.
  Error lost_error(const Job& job, std::uint32_t rank, const std::string& what) const;
  void end_session(Session& session, const Error& error);
  /// The job gives up its name.
  void begin_ending(Job& job);
  /// A rank of the job has left in order. The others may stay while they do not need it.
  void note_leave(Job& job, std::uint32_t rank, const std::string& leaver);
  /// Fails the job when it cannot go on without those that left.
  void check_leavers(Job& job);
  void miss_leaver(Job& job, std::uint32_t rank, const std::string& need);
  void fence(Session& session);
  void on_drained(Session& session);
  void finish_detach(Session& session);
  bool releasable(const Session& session) const;
  void release(Session& session);
  void record_failure(const Session& session);

  // control_plane.cc
  void tick_job(Job& job);
  void tell_network_rate(Session& session);
  void tick_session(Session& session);
  /// Looks at what the session's client says of itself.
  void watch_client(Session& session);
  void on_session_fault(Session& session, const SessionFault& fault);
  void on_link_down(std::uint32_t rail, const LinkDown& event);
  /// Why it went down, by its endpoint; empty: that does not say.
  std::string link_reason(std::uint32_t rail, fabric::LinkId link) const;
  std::vector<Job*> jobs() const;
  Proxy& proxy_of(const Session& session) { return *proxies_[session.rail]; }
  std::string describe_node(NodeId node) const;
  /// `user`: whose client caused it.
  void log(LogLevel level, std::string message,
           std::vector<std::pair<std::string, std::string>> fields = {},
           std::optional<std::uint32_t> user = std::nullopt,
           SourceLine where = SourceLine::current()) const;
  void log(LogLevel level, std::string message, const Session& session,
           SourceLine where = SourceLine::current()) const;

  // inspect.cc
  SessionInfo info_of(const Session& session) const;
  /// For users, when its process does not run; else empty.
  std::string stopped_text(const Session& session) const;
  JobInfo info_of(const Job& job) const;
  std::uint64_t age_of(const Job& job) const;  ///< since its first rank attached here

  const ControlOptions options_;
  ClientPort& clients_port_;
  PeerTransport& transport_;
  const std::vector<Proxy*> proxies_;
  const std::function<std::uint64_t()> now_;
  PeerHello hello_;
  std::vector<Bytes> rail_addresses_;  ///< as other nodes have been told last
  std::mt19937_64 random_;
  bool draining_ = false;
  std::uint64_t waited_ns_ = 0;  ///< by this event, for peers
  std::size_t ticks_ = 0;
  std::string drain_reason_;
  std::uint32_t next_session_id_ = 1;

  HeartbeatTable heartbeats_;  ///< before the sessions, whose words it has
  LinkTable links_;            ///< before the sessions, whose bindings give links back
  std::map<ClientId, Client> clients_;
  std::map<NodeId, PeerState> peers_;                           ///< all that the transport knows
  std::vector<std::unique_ptr<Job>> jobs_;                      ///< living and ending
  std::map<std::string, Job*> by_name_;                         ///< those that are not ending
  std::map<std::uint32_t, std::unique_ptr<Session>> sessions_;  ///< by id, until released
  /// All that immediates can name, of which `sessions_max` are in use at most: the others rest.
  std::vector<Session*> by_slot_ = std::vector<Session*>(shm::kSessionsMax);
  struct FreeSlot {
    std::uint32_t slot = 0;
    std::uint64_t from_ns = 0;  ///< not to be used before
  };
  std::deque<FreeSlot> free_slots_;  ///< the longest free first
  struct RecentFailure {
    std::uint64_t ended_ns;
    SessionInfo session;
  };
  std::deque<RecentFailure> recent_failures_;
  std::uint64_t sessions_failed_ = 0;
  LaneTotals released_;  ///< of the lanes of released sessions
  control::EndedJobs ended_jobs_{options_.ended_jobs_keep_ns};
  control::OperatorTotals operator_totals_{options_.ended_jobs_keep_ns};
};

}  // namespace mk::daemon
