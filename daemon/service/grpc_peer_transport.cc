#include "daemon/service/grpc_peer_transport.h"

#include <algorithm>

#include "daemon/rpc/grpc_channel.h"
#include "daemon/service/peer_convert.h"
#include "daemon/service/peer_transport_impl.h"

namespace mk::daemon {
namespace {

constexpr auto kFlushTime = std::chrono::seconds(1);

}  // namespace

// -- life -------------------------------------------------------------------------------------

GrpcPeerTransport::Impl::Impl(PeerTransportOptions options, PeerSink& sink, Logger& logger)
    : options_(std::move(options)), sink_(sink), logger_(logger), tls_(options_.tls) {
  for (const PeerConfig& config : options_.peers) {
    place(peers_[config.id], config);
  }
}

void GrpcPeerTransport::Impl::place(Peer& peer, const PeerConfig& config) {
  peer.config = config;
  peer.info.node = config.id;
  peer.info.address = config.address.text();
  peer.certificate_trouble.clear();
  if (options_.node > config.id) peer.stub = make_stub(peer, tls_.texts());
}

std::unique_ptr<v1::Peer::Stub> GrpcPeerTransport::Impl::make_stub(Peer& peer,
                                                                   const TlsTexts& tls) {
  ChannelOptions channel;
  channel.tls = tls;
  channel.tls_name = peer.config.name;
  channel.connect_timeout = options_.backoff_max;
  channel.reconnect_min = options_.backoff_min;
  channel.keepalive_time = options_.keepalive_time;
  channel.keepalive_timeout = options_.keepalive_timeout;
  peer.tls = tls;
  return v1::Peer::NewStub(open_channel(peer.config.address, channel));
}

void GrpcPeerTransport::Impl::renew_tls(Peer& peer) {
  if (options_.tls.cert_path.empty() || peer.config.address.unix_socket) return;
  const TlsTexts tls = tls_.texts();
  if (tls != peer.tls) peer.stub = make_stub(peer, tls);
}

void GrpcPeerTransport::Impl::start() {
  std::lock_guard lock(mutex_);
  if (state_ != State::kNew) return;
  state_ = State::kRunning;
  for (auto& [node, peer] : peers_) {
    if (peer.stub) call(peer);
  }
  timers_ = std::thread([this] { run_timers(); });
}

void GrpcPeerTransport::Impl::stop() {
  std::unique_lock lock(mutex_);
  if (state_ == State::kStopped) return;
  state_ = State::kStopping;
  changed_.notify_all();
  // Last words, such as that a job ends here, are worth a moment; a peer that does not read is not.
  changed_.wait_for(lock, kFlushTime, [this] { return flushed(); });
  const std::string reason = fmt::format("node {} is shutting down", options_.node);
  for (PeerStream* stream : streams_) {
    if (stream->detached) continue;
    stream->detached = true;
    stream->finish(grpc::Status(grpc::StatusCode::UNAVAILABLE, reason));
  }
  for (auto& [node, peer] : peers_) peer.stream = nullptr;
  if (!changed_.wait_for(lock, kFlushTime, [this] { return streams_.empty(); })) {
    for (PeerStream* stream : streams_) stream->cancel();
    changed_.wait(lock, [this] { return streams_.empty(); });  // gRPC ends cancelled calls
  }
  state_ = State::kStopped;
  lock.unlock();
  if (timers_.joinable()) timers_.join();
}

bool GrpcPeerTransport::Impl::flushed() const {
  return std::all_of(streams_.begin(), streams_.end(), [](const PeerStream* stream) {
    return stream->detached || stream->ended || !stream->greeted || stream->queue.empty();
  });
}

// -- the control thread -----------------------------------------------------------------------

Status GrpcPeerTransport::Impl::send(NodeId node, const PeerMessage& message) {
  v1::PeerMessage proto = to_proto(message);
  std::lock_guard lock(mutex_);
  const auto at = peers_.find(node);
  if (at == peers_.end()) {
    return fail(ErrorCode::kNotFound, "node {} is not among the configured peers of node {}", node,
                options_.node);
  }
  Peer& peer = at->second;
  if (!up(peer) || state_ != State::kRunning) {
    return fail(ErrorCode::kUnavailable, "no connection to {}{}{}", name(peer),
                peer.info.reason.empty() ? "" : ": ", peer.info.reason);
  }
  if (peer.stream->queue_bytes + proto.ByteSizeLong() > options_.queue_bytes_max) {
    const std::string reason = fmt::format("{} does not take messages: {} bytes are queued",
                                           name(peer), peer.stream->queue_bytes);
    PeerStream& stream = *peer.stream;
    detach(stream, reason);
    stream.cancel();
    return fail(ErrorCode::kLimitExceeded, "{}", reason);
  }
  enqueue(*peer.stream, std::move(proto));
  ++peer.info.messages_sent;
  return {};
}

void GrpcPeerTransport::Impl::disconnect(NodeId node, const std::string& reason) {
  std::lock_guard lock(mutex_);
  const auto at = peers_.find(node);
  if (at == peers_.end() || !at->second.stream) return;
  end(*at->second.stream, grpc::StatusCode::FAILED_PRECONDITION, reason);
}

std::vector<NodeId> GrpcPeerTransport::Impl::nodes() const {
  std::lock_guard lock(mutex_);
  std::vector<NodeId> nodes;
  for (const auto& [node, peer] : peers_) nodes.push_back(node);
  return nodes;
}

std::string GrpcPeerTransport::Impl::describe(NodeId node) const {
  std::lock_guard lock(mutex_);
  const auto at = peers_.find(node);
  return at == peers_.end() ? fmt::format("node {} (not configured)", node) : name(at->second);
}

std::string GrpcPeerTransport::Impl::trouble(NodeId node) const {
  std::lock_guard lock(mutex_);
  const auto at = peers_.find(node);
  if (at == peers_.end()) return "it is not among the configured peers";
  const Peer& peer = at->second;
  if (up(peer)) return "";
  if (!peer.certificate_trouble.empty()) return peer.certificate_trouble;
  if (!peer.info.reason.empty()) return peer.info.reason;
  return peer.stub ? "" : "it has not called yet";
}

std::vector<PeerInfo> GrpcPeerTransport::Impl::peers() const {
  std::lock_guard lock(mutex_);
  std::vector<PeerInfo> all;
  for (const auto& [node, peer] : peers_) {
    PeerInfo info = peer.info;
    const bool is_up = up(peer);
    const bool ending = !is_up && peer.stream && peer.stream->greeted;
    info.state = is_up ? PeerState::kUp : peer.stub ? PeerState::kConnecting : PeerState::kWaiting;
    if (!is_up && !peer.certificate_trouble.empty()) info.reason = peer.certificate_trouble;
    if (ending) info.reason = "its stream is ending";
    const std::int64_t since_ns = is_up    ? peer.stream->since_ns
                                  : ending ? peer.stream->ended_ns
                                           : peer.down_since_ns;
    info.state_for_ns = static_cast<std::uint64_t>(peer_clock_ns() - since_ns);
    if (is_up) info.up_for_ns = info.state_for_ns;
    all.push_back(std::move(info));
  }
  return all;
}

std::vector<CertificateWatch::Target> GrpcPeerTransport::Impl::unconnected() const {
  std::lock_guard lock(mutex_);
  std::vector<CertificateWatch::Target> targets;
  for (const auto& [node, peer] : peers_) {
    const Address& address = peer.config.address;
    if (up(peer) || address.unix_socket) continue;
    targets.push_back({node, address, peer.config.name.empty() ? address.host : peer.config.name});
  }
  return targets;
}

void GrpcPeerTransport::Impl::note_certificate(NodeId node, const std::string& trouble) {
  std::lock_guard lock(mutex_);
  const auto at = peers_.find(node);
  if (at == peers_.end() || up(at->second) || at->second.certificate_trouble == trouble) return;
  at->second.certificate_trouble = trouble;
  if (trouble.empty()) return;
  logger_.write_limited("peer's certificate", LogLevel::kError,
                        fmt::format("{} is kept away by TLS: {}", name(at->second), trouble),
                        {{"peer", std::to_string(node)}});
}

// -- nodes that join and leave ----------------------------------------------------------------

void GrpcPeerTransport::Impl::set_peers(const std::vector<PeerConfig>& peers) {
  std::lock_guard lock(mutex_);
  if (state_ == State::kStopping || state_ == State::kStopped) return;
  for (auto& [node, peer] : peers_) peer.leaves = true;
  bool fresh = false;
  tls_.renew();
  for (const PeerConfig& config : peers) {
    if (config.id == options_.node) continue;
    const auto [at, added] = peers_.try_emplace(config.id);
    Peer& peer = at->second;
    peer.leaves = false;
    if (added) {
      place(peer, config);
      fresh = true;
      if (peer.stub && state_ == State::kRunning) call(peer);
      continue;
    }
    const bool same =
        peer.config.address.text() == config.address.text() && peer.config.name == config.name;
    peer.elsewhere = same ? std::nullopt : std::optional(config);
    // It was about to go: nobody has arranged to call it again.
    if (same && peer.stub && !peer.stream && !peer.call_at) schedule_call(peer);
  }
  if (fresh) sink_.peers_changed();
  settle_peers();
}

void GrpcPeerTransport::Impl::settle_peers() {
  bool gone = false;
  for (auto at = peers_.begin(); at != peers_.end();) {
    Peer& peer = at->second;
    if (!peer.leaves && !peer.elsewhere) {
      ++at;
      continue;
    }
    if (peer.stream && !peer.stream->greeted) {
      end(*peer.stream, grpc::StatusCode::CANCELLED,
          peer.leaves ? "it has left the cluster" : "it is elsewhere now");
    }
    if (peer.stream) {
      ++at;
    } else if (peer.leaves) {
      retire(peer);
      at = peers_.erase(at);
      gone = true;
    } else {
      retire(peer);
      place(peer, *peer.elsewhere);
      peer.elsewhere.reset();
      peer.backoff = std::chrono::milliseconds(0);
      peer.said = false;
      if (peer.stub && state_ == State::kRunning) call(peer);
      ++at;
    }
  }
  if (gone) sink_.peers_changed();
  changed_.notify_all();
}

void GrpcPeerTransport::Impl::retire(Peer& peer) {
  if (peer.stub) retired_.emplace_back(peer.config.id, std::move(peer.stub));
}

void GrpcPeerTransport::Impl::bury_retired() {
  std::erase_if(retired_, [this](const auto& retired) {
    return std::none_of(streams_.begin(), streams_.end(), [&](const PeerStream* stream) {
      return stream->calling && stream->node == retired.first;
    });
  });
}

void GrpcPeerTransport::Impl::identify(v1::IdentifyResponse& response) const {
  response.set_node(options_.node);
  response.set_generation(sink_.hello().generation);
  response.set_version(sink_.hello().version);
}

// -- the public face --------------------------------------------------------------------------

GrpcPeerTransport::GrpcPeerTransport(PeerTransportOptions options, PeerSink& sink, Logger& logger)
    : impl_(std::make_unique<Impl>(std::move(options), sink, logger)) {}
GrpcPeerTransport::~GrpcPeerTransport() = default;
grpc::Service& GrpcPeerTransport::service() { return impl_->service(); }
void GrpcPeerTransport::start() { impl_->start(); }
void GrpcPeerTransport::stop() { impl_->stop(); }
void GrpcPeerTransport::set_peers(const std::vector<PeerConfig>& peers) { impl_->set_peers(peers); }
std::vector<NodeId> GrpcPeerTransport::nodes() const { return impl_->nodes(); }
bool GrpcPeerTransport::discovers() const { return impl_->discovers(); }
Status GrpcPeerTransport::send(NodeId node, const PeerMessage& message) {
  return impl_->send(node, message);
}
std::string GrpcPeerTransport::describe(NodeId node) const { return impl_->describe(node); }
std::string GrpcPeerTransport::trouble(NodeId node) const { return impl_->trouble(node); }
void GrpcPeerTransport::disconnect(NodeId node, const std::string& reason) {
  impl_->disconnect(node, reason);
}
std::vector<PeerInfo> GrpcPeerTransport::peers() const { return impl_->peers(); }
std::vector<CertificateWatch::Target> GrpcPeerTransport::unconnected() const {
  return impl_->unconnected();
}
void GrpcPeerTransport::note_certificate(NodeId node, const std::string& trouble) {
  impl_->note_certificate(node, trouble);
}
std::size_t GrpcPeerTransport::streams() const { return impl_->streams(); }

}  // namespace mk::daemon
