/// \file
/// What daemons say to each other, and how the control plane says it: an ordered stream of messages
/// per pair of daemons. mkerneld carries them over gRPC (proto/mkernel/v1/peer.proto); embedded
/// daemons and tests within the process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "shm/host/result.h"

namespace mk::daemon {

using NodeId = std::uint32_t;  ///< a daemon's number in the cluster, from its configuration
using Bytes = std::vector<std::byte>;

/// The first message of a stream: who speaks, and how to reach its rails.
struct PeerHello {
  NodeId node = 0;
  std::uint64_t generation = 0;  ///< differs after every start of that daemon
  std::uint16_t abi_major = 0;
  std::uint16_t abi_minor = 0;
  std::string version;
  std::string fabric;  ///< Capabilities::name; both sides must agree
  std::vector<Bytes> rail_addresses;
  std::vector<std::string> rail_devices;  ///< NICs' names, for users
  std::uint32_t protocol = 0;             ///< kPeerProtocol; 0: a daemon of before there were any
};

/// What daemons say to each other. Both must speak the same: one that took an older daemon's word
/// for what this one proves would give a hostile daemon the choice.
inline constexpr std::uint32_t kPeerProtocol = 2;

/// The sender's rail is to be reached there from now on, whatever its PeerHello said: its NIC has
/// another place in the network, or came back after a failure.
struct RailMoved {
  std::uint32_t rail = 0;
  Bytes address;
};

/// One rank of a node's part of a job.
struct PeerSession {
  std::uint32_t rank = 0;
  std::uint32_t slot = 0;
  std::uint32_t flag_count = 0;
  Bytes flags_key;         ///< the fabric's key of its arrival flags
  std::uint32_t rail = 0;  ///< of its node, that serves it
};

/// That a node has a part of a job: sent to all nodes when all its local ranks have attached, since
/// nobody knows yet which nodes the job is on. It holds nothing that helps one that has no part of
/// the job. `part_id` is random per part. Every later message about the job carries it, so that a
/// job restarted under the same name never mixes with its predecessor.
struct JobOffer {
  std::string job;
  std::uint64_t part_id = 0;
  std::uint32_t node_rank = 0;
  std::uint32_t nodes = 1;
  std::uint32_t local_size = 1;
  std::uint32_t uid = 0;    ///< of the ranks
  bool has_secret = false;  ///< the job has one
  Bytes nonce;  ///< kNonceBytes, fresh for the part: what the other node's proof is made of
};

/// The answer to an offer of a job that the sender has a part of, too: that it knows the job's
/// secret (job_proof).
struct JobProof {
  std::string job;
  std::uint64_t part_id = 0;
  std::uint64_t peer_part_id = 0;  ///< of the receiver: the offer that is answered
  Bytes proof;
};

/// A node's part of a job, with what one must have to reach its ranks' flags: only to a node whose
/// proof was right.
struct JobPart {
  std::string job;
  std::uint64_t part_id = 0;
  std::uint32_t node_rank = 0;
  std::uint32_t nodes = 1;
  std::uint32_t local_size = 1;
  std::vector<PeerSession> sessions;
};

/// The sender has connected the rails it needs for the job and holds the parts of all nodes. A job
/// is up at a node when that node is ready itself and has this from every other one. It counts only
/// for the part of the receiver that the sender holds: the sender may have been ready with one that
/// has ended since, and may itself be about to end for that.
struct JobReady {
  std::string job;
  std::uint64_t part_id = 0;
  std::uint64_t peer_part_id = 0;  ///< of the receiver
};

struct RegionAnnounce {
  std::string job;
  std::uint64_t part_id = 0;
  std::uint32_t rank = 0;
  std::uint16_t handle = 0;
  std::uint64_t bytes = 0;
  Bytes key;
};

/// The region is going. The receiver sends the same message back once nothing of its own in flight
/// names it: the owner, who knows its own `part_id`, may then deregister the memory. With `shared`
/// the receiver's rank may go on naming it until it retires it by itself; without, what it has
/// committed is the last. Older daemons know of no `shared`, and send back no `arrivals`.
struct RegionWithdraw {
  std::string job;
  std::uint64_t part_id = 0;  ///< of the region's owner, both ways
  std::uint32_t rank = 0;
  std::uint16_t handle = 0;
  bool shared = false;
  // Flags of the owner that go with it: whole granules.
  std::uint32_t flag_base = 0;
  std::uint32_t flag_count = 0;
  /// Sent back: writes to these flags that have been completed since the job came up.
  std::optional<std::uint64_t> arrivals = std::nullopt;
};

struct ExchangePart {
  std::string job;
  std::uint64_t part_id = 0;
  std::uint32_t rank = 0;
  std::uint64_t sequence = 0;  ///< the rank's exchanges, counted from 0
  std::string tag;
  Bytes blob;
};

/// With `code` not kOk: the job has come to an end at the sender, because of `rank` (any rank of
/// the job). With kOk: the part is gone, all its ranks have left and nothing of theirs is in
/// flight. So memory that they could write to may be deregistered. A part sends each at most once,
/// in this order. `peer_part_id` is the receiver's part that the sender held: a part that ended
/// without the receiver's belonged to a run of the job before the receiver's, and says nothing
/// about that.
struct JobLeft {
  std::string job;
  std::uint64_t part_id = 0;
  std::uint32_t rank = 0;  ///< whose failure it was
  ErrorCode code = ErrorCode::kOk;
  std::string reason;
  std::optional<std::uint64_t> peer_part_id;  ///< 0: none; nullopt: it does not say
};

using PeerMessage = std::variant<PeerHello, JobPart, JobReady, RegionAnnounce, RegionWithdraw,
                                 ExchangePart, JobLeft, RailMoved, JobOffer, JobProof>;

/// Sends messages to other daemons. Called by the control thread; never blocks. Messages to one
/// node arrive in order or not at all: when a stream breaks, the control plane is told
/// (on_peer_down) and everything between the two starts anew with PeerHello.
class PeerTransport {
 public:
  virtual ~PeerTransport() = default;
  /// The other nodes of the cluster: as configured, and found since.
  virtual std::vector<NodeId> nodes() const = 0;
  /// Whether nodes may join and leave while this runs: PeerSink::peers_changed tells.
  virtual bool discovers() const { return false; }
  /// Queues `message`; kUnavailable when no stream to `node` is up.
  virtual Status send(NodeId node, const PeerMessage& message) = 0;
  /// A person's name for the node: "node 1 (10.0.0.2:7171)".
  virtual std::string describe(NodeId node) const = 0;
  /// Why no stream to `node` is up, as far as the transport knows: for errors about missing nodes.
  /// Empty: it knows no more than the last peer_down said.
  virtual std::string trouble(NodeId) const { return {}; }
  /// Breaks the stream to `node` because of what came over it; a new one may be tried later, with
  /// backoff. The sink need not be told, but may be.
  virtual void disconnect(NodeId node, const std::string& reason) = 0;
};

/// Where a PeerTransport hands over what it receives. Thread-safe and never blocks: calls are
/// queued for the control thread in order. For one node they come as PeerHello, other messages,
/// peer_down, PeerHello, .... A transport that replaces a stream reports the end of the old one
/// before it hands over the new one's PeerHello, and nothing of the old one afterwards.
class PeerSink {
 public:
  virtual ~PeerSink() = default;
  /// Called once when the message has been handled, on the sink's thread and never within
  /// peer_message; not called any more when the sink has stopped. May be empty.
  using Taken = std::function<void()>;
  /// A transport whose peers are others' programs reads no more of a peer while many of its
  /// messages have not been taken: the queue is not bounded otherwise.
  virtual void peer_message(NodeId node, PeerMessage message, Taken taken) = 0;
  virtual void peer_down(NodeId node, std::string reason) = 0;
  /// PeerTransport::nodes() differs. A node that it no longer names has no stream.
  virtual void peers_changed() {}
  /// What this daemon says first on every new stream. Constant: where its rails are by now follows
  /// as RailMoved.
  virtual const PeerHello& hello() const = 0;
  /// The same for `node`, which alone may have it: its rails' addresses tell this daemon later who
  /// speaks.
  virtual PeerHello hello_for(NodeId /*node*/) const { return hello(); }
};

}  // namespace mk::daemon
