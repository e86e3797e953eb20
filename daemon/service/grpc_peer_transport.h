/// \file
/// PeerTransport over gRPC (proto/mkernel/v1/peer.proto). One bidirectional stream per pair of
/// daemons carries both directions, so that a break is one event for both; of a pair, the daemon
/// with the higher node id calls, and calls again with growing pauses. Both sides must list each
/// other.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "daemon/config/config.h"
#include "daemon/control/peer_transport.h"
#include "daemon/rpc/grpc_channel.h"
#include "daemon/service/log.h"
#include "daemon/tls/peer_watch.h"

namespace grpc {
class Service;
}  // namespace grpc

namespace mk::daemon {

struct PeerTransportOptions {
  NodeId node = 0;
  std::vector<PeerConfig> peers;
  bool discovers = false;  ///< set_peers will come
  /// Unix sockets never use TLS. When it names its files, they are read again in the pause before
  /// a call.
  TlsTexts tls;
  std::size_t queue_bytes_max = 64 << 20;  ///< per peer, not yet taken by the network
  /// Per peer, received and not yet taken by the sink: at either, nothing more is read from it, and
  /// its own queue fills.
  std::size_t unread_messages_max = 4096;
  std::size_t unread_bytes_max = 4 << 20;
  std::chrono::milliseconds backoff_min{100}, backoff_max{5'000};
  std::chrono::milliseconds hello_timeout{5'000};
  /// A peer that has not answered a ping for keepalive_time + keepalive_timeout is down.
  std::chrono::milliseconds keepalive_time{2'000}, keepalive_timeout{3'000};
};

enum class PeerState {
  kConnecting,  ///< we call
  kWaiting,     ///< the peer is the one who calls
  kUp,
};

/// For the Admin service.
struct PeerInfo {
  NodeId node = 0;
  std::string address;
  PeerState state = PeerState::kConnecting;
  std::string reason;   ///< of the last failure; empty if there was none
  std::string version;  ///< from the last Hello
  std::uint64_t up_for_ns = 0;
  std::uint64_t state_for_ns = 0;  ///< how long it has been up, or not been up
  std::uint64_t messages_sent = 0, messages_received = 0;  ///< without Hello
  std::uint64_t breaks = 0;                                ///< of streams that were up
};

class GrpcPeerTransport final : public PeerTransport {
 public:
  /// `sink` and `logger` outlive this.
  GrpcPeerTransport(PeerTransportOptions options, PeerSink& sink, Logger& logger);
  ~GrpcPeerTransport() override;  ///< after `stop` and after the server has been shut down

  /// To be registered with the server before it starts; lives as long as this.
  grpc::Service& service();
  /// Begins to call peers and to take calls.
  void start();
  /// Sends what is queued (for at most a second), closes all streams, refuses new ones. The sink is
  /// not used after it. Call it before the server's shutdown. Idempotent.
  void stop();

  /// The other nodes are these from now on. One that is not among them any more, or that is
  /// elsewhere now, keeps a stream that is up: it goes, or is called there, when that breaks.
  void set_peers(const std::vector<PeerConfig>& peers);

  // PeerTransport. Thread-safe, none blocks.
  std::vector<NodeId> nodes() const override;
  bool discovers() const override;
  Status send(NodeId node, const PeerMessage& message) override;
  std::string describe(NodeId node) const override;
  std::string trouble(NodeId node) const override;
  void disconnect(NodeId node, const std::string& reason) override;

  std::vector<PeerInfo> peers() const;
  /// The peers that are not connected, with addresses at which TLS can be tried.
  std::vector<CertificateWatch::Target> unconnected() const;
  /// What TLS has against `node` and us, until it is connected: its reason, and a line in the log.
  void note_certificate(NodeId node, const std::string& trouble);
  /// Streams that exist, also unauthenticated ones and those winding down.
  std::size_t streams() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace mk::daemon
