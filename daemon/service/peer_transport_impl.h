/// \file
/// The inside of GrpcPeerTransport, in two files: grpc_peer_transport.cc for what our own threads
/// call, peer_transport_streams.cc for what happens on streams.
#pragma once

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "daemon/rpc/tls_reader.h"
#include "daemon/service/grpc_peer_transport.h"
#include "daemon/service/peer_stream.h"

namespace mk::daemon {

using PeerClock = std::chrono::steady_clock;

inline std::int64_t peer_clock_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(PeerClock::now().time_since_epoch())
      .count();
}

class GrpcPeerTransport::Impl final : public PeerStreamOwner {
 public:
  Impl(PeerTransportOptions options, PeerSink& sink, Logger& logger);
  ~Impl() override { stop(); }

  void start();
  void stop();
  Status send(NodeId node, const PeerMessage& message);
  void disconnect(NodeId node, const std::string& reason);
  void set_peers(const std::vector<PeerConfig>& peers);
  bool discovers() const { return options_.discovers; }
  std::vector<NodeId> nodes() const;
  std::string describe(NodeId node) const;
  std::string trouble(NodeId node) const;
  std::vector<PeerInfo> peers() const;
  std::vector<CertificateWatch::Target> unconnected() const;
  void note_certificate(NodeId node, const std::string& trouble);
  std::size_t streams() const {
    std::lock_guard lock(mutex_);
    return streams_.size();
  }
  grpc::Service& service() { return service_; }

  // PeerStreamOwner, on gRPC's threads.
  void on_read(PeerStream& stream, bool ok) override;
  void on_written(PeerStream& stream, bool ok) override;
  void on_done(PeerStream& stream, const grpc::Status& status) override;

 private:
  struct Peer {
    PeerConfig config;
    std::unique_ptr<v1::Peer::Stub> stub;  ///< null: the peer calls
    TlsTexts tls;                          ///< what `stub` shows and trusts
    PeerStream* stream = nullptr;          ///< calling, or greeted
    std::optional<PeerClock::time_point> call_at;
    std::chrono::milliseconds backoff{0};
    std::int64_t down_since_ns = peer_clock_ns();  ///< while no stream is up
    /// What TLS has against the two of us; says more than gRPC's reason.
    std::string certificate_trouble;
    bool said = false;                    ///< that it can't be reached is in the log already
    std::string refused;                  ///< why it was refused last, as the log has it
    bool leaves = false;                  ///< goes when its stream has gone
    std::optional<PeerConfig> elsewhere;  ///< is called there when its stream has gone
    /// Handed to the sink and not taken by it yet, of all its streams.
    std::size_t unread_messages = 0, unread_bytes = 0;
    PeerInfo info;
  };
  class Service final : public v1::Peer::CallbackService {
   public:
    explicit Service(Impl& impl) : impl_(impl) {}
    grpc::ServerBidiReactor<v1::PeerMessage, v1::PeerMessage>* Connect(
        grpc::CallbackServerContext* context) override {
      return impl_.accept(*context);
    }
    grpc::ServerUnaryReactor* Identify(grpc::CallbackServerContext* context,
                                       const v1::IdentifyRequest*,
                                       v1::IdentifyResponse* response) override {
      impl_.identify(*response);
      grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
      reactor->Finish(grpc::Status::OK);
      return reactor;
    }

   private:
    Impl& impl_;
  };

  grpc::ServerBidiReactor<v1::PeerMessage, v1::PeerMessage>* accept(
      grpc::CallbackServerContext& context);

  /// The sink has taken a message of the node. On the sink's thread.
  void on_taken(NodeId node, std::size_t bytes);

  void identify(v1::IdentifyResponse& response) const;
  std::unique_ptr<v1::Peer::Stub> make_stub(Peer& peer, const TlsTexts& tls);
  /// Fills a new peer in, or points one elsewhere.
  void place(Peer& peer, const PeerConfig& config);

  // With mutex_ held:
  /// Before a call: the files of [tls] may have been read anew.
  void renew_tls(Peer& peer);
  void call(Peer& peer);
  void enqueue(PeerStream& stream, v1::PeerMessage message);
  void greet(PeerStream& stream, PeerHello hello, std::size_t bytes);
  void log_refusal(const PeerStream& stream, NodeId node, const std::string& reason);
  /// Why the caller of `stream` may not speak for hello.node; OK when it may.
  grpc::Status judge_caller(const PeerStream& stream, const PeerHello& hello);
  /// The stream is its peer's no longer: the sink is told when it had been greeted.
  void detach(PeerStream& stream, const std::string& reason);
  /// Ends a stream because of what we found out; the called side tells the caller why.
  void end(PeerStream& stream, grpc::StatusCode code, const std::string& reason);
  /// Nothing more is read from it, or written to it.
  void note_ended(PeerStream& stream);
  /// Hands a message to the sink, and notes that it is to be taken.
  void hand_over(Peer& peer, PeerMessage message, std::size_t bytes);
  /// Reads on, unless too much of the peer waits for the sink.
  void read_on(Peer& peer, PeerStream& stream);
  bool too_much_unread(const Peer& peer) const {
    return peer.unread_messages >= options_.unread_messages_max ||
           peer.unread_bytes >= options_.unread_bytes_max;
  }
  void schedule_call(Peer& peer);
  /// Carries set_peers out for all peers that no stream keeps.
  void settle_peers();
  void retire(Peer& peer);
  void bury_retired();
  /// Calls that are due, callers that never said Hello, streams that do not end.
  void run_timers();
  bool flushed() const;
  /// Whether messages go both ways.
  static bool up(const Peer& peer) {
    return peer.stream != nullptr && peer.stream->greeted && !peer.stream->ended;
  }
  std::string name(const Peer& peer) const {
    return fmt::format("node {} ({})", peer.config.id, peer.config.address.text());
  }

  const PeerTransportOptions options_;
  PeerSink& sink_;
  Logger& logger_;
  Service service_{*this};
  TlsReader tls_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;  ///< streams_, queues, timers, state
  std::map<NodeId, Peer> peers_;
  std::set<PeerStream*> streams_;  ///< all that have not reported on_done
  /// Of nodes that are gone or elsewhere: kept until their streams are gone, since those would
  /// otherwise take the channel along on gRPC's thread (see PeerStreamOwner::on_done).
  std::vector<std::pair<NodeId, std::unique_ptr<v1::Peer::Stub>>> retired_;
  enum class State { kNew, kRunning, kStopping, kStopped } state_ = State::kNew;
  std::minstd_rand random_{std::random_device{}()};
  std::thread timers_;
};

}  // namespace mk::daemon
