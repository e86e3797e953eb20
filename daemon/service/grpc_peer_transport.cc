#include "daemon/service/grpc_peer_transport.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <thread>

#include "daemon/service/grpc_channel.h"
#include "daemon/service/peer_convert.h"
#include "daemon/service/peer_stream.h"

namespace mk::daemon {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kFlushTime = std::chrono::seconds(1);
constexpr auto kSteadyTime = std::chrono::seconds(2);  ///< up so long: the next break is a new one
constexpr std::size_t kUngreetedMax = 64;

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch())
      .count();
}

}  // namespace

class GrpcPeerTransport::Impl final : public PeerStreamOwner {
 public:
  Impl(PeerTransportOptions options, PeerSink& sink, Logger& logger);
  ~Impl() override { stop(); }

  void start();
  void stop();
  Status send(NodeId node, const PeerMessage& message);
  void disconnect(NodeId node, const std::string& reason);
  std::vector<NodeId> nodes() const;
  std::string describe(NodeId node) const;
  std::vector<PeerInfo> peers() const;
  grpc::Service& service() { return service_; }

  // PeerStreamOwner, on gRPC's threads.
  void on_read(PeerStream& stream, bool ok) override;
  void on_written(PeerStream& stream, bool ok) override;
  void on_done(PeerStream& stream, const grpc::Status& status) override;

 private:
  struct Peer {
    PeerConfig config;
    std::unique_ptr<v1::Peer::Stub> stub;  ///< null: the peer calls
    PeerStream* stream = nullptr;          ///< calling, or greeted
    std::optional<Clock::time_point> call_at;
    std::chrono::milliseconds backoff{0};
    bool said = false;  ///< that it can't be reached is in the log already
    PeerInfo info;
  };
  class Service final : public v1::Peer::CallbackService {
   public:
    explicit Service(Impl& impl) : impl_(impl) {}
    grpc::ServerBidiReactor<v1::PeerMessage, v1::PeerMessage>* Connect(
        grpc::CallbackServerContext* context) override {
      return impl_.accept(*context);
    }

   private:
    Impl& impl_;
  };

  grpc::ServerBidiReactor<v1::PeerMessage, v1::PeerMessage>* accept(
      grpc::CallbackServerContext& context);

  // With mutex_ held:
  void call(Peer& peer);
  void enqueue(PeerStream& stream, v1::PeerMessage message);
  void greet(PeerStream& stream, PeerHello hello);
  /// Why the caller of `stream` may not speak for hello.node; OK when it may.
  grpc::Status judge_caller(const PeerHello& hello);
  /// The stream is its peer's no longer: the sink is told when it had been greeted.
  void detach(PeerStream& stream, const std::string& reason);
  /// Ends a stream because of what we found out; the called side tells the caller why.
  void end(PeerStream& stream, grpc::StatusCode code, const std::string& reason);
  void schedule_call(Peer& peer);
  /// Calls that are due and callers that never said Hello.
  void run_timers();
  bool flushed() const;
  std::string name(const Peer& peer) const {
    return fmt::format("node {} ({})", peer.config.id, peer.config.address.text());
  }

  const PeerTransportOptions options_;
  PeerSink& sink_;
  Logger& logger_;
  Service service_{*this};
  v1::PeerMessage hello_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;  ///< streams_, queues, timers, state
  std::map<NodeId, Peer> peers_;
  std::set<PeerStream*> streams_;  ///< all that have not reported on_done
  enum class State { kNew, kRunning, kStopping, kStopped } state_ = State::kNew;
  std::minstd_rand random_{std::random_device{}()};
  std::thread timers_;
};

// -- life
// ------------------------------------------------------------------------------------------

GrpcPeerTransport::Impl::Impl(PeerTransportOptions options, PeerSink& sink, Logger& logger)
    : options_(std::move(options)), sink_(sink), logger_(logger) {
  for (const PeerConfig& config : options_.peers) {
    Peer& peer = peers_[config.id];
    peer.config = config;
    peer.info.node = config.id;
    peer.info.address = config.address.text();
    if (options_.node > config.id) {
      ChannelOptions channel;
      channel.tls = {options_.tls_cert, options_.tls_key, options_.tls_ca};
      channel.connect_timeout = options_.backoff_max;
      channel.reconnect_min = options_.backoff_min;
      channel.keepalive_time = options_.keepalive_time;
      channel.keepalive_timeout = options_.keepalive_timeout;
      peer.stub = v1::Peer::NewStub(open_channel(config.address, channel));
    }
  }
}

void GrpcPeerTransport::Impl::start() {
  std::lock_guard lock(mutex_);
  if (state_ != State::kNew) return;
  state_ = State::kRunning;
  hello_ = to_proto(sink_.hello());
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

// -- the control thread
// ----------------------------------------------------------------------------

Status GrpcPeerTransport::Impl::send(NodeId node, const PeerMessage& message) {
  v1::PeerMessage proto = to_proto(message);
  std::lock_guard lock(mutex_);
  const auto at = peers_.find(node);
  if (at == peers_.end()) {
    return fail(ErrorCode::kNotFound, "node {} is not among the configured peers of node {}", node,
                options_.node);
  }
  Peer& peer = at->second;
  if (!peer.stream || !peer.stream->greeted || peer.stream->ended || state_ != State::kRunning) {
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
  std::vector<NodeId> nodes;  // peers_' keys never change
  for (const auto& [node, peer] : peers_) nodes.push_back(node);
  return nodes;
}

std::string GrpcPeerTransport::Impl::describe(NodeId node) const {
  const auto at = peers_.find(node);
  return at == peers_.end() ? fmt::format("node {} (not configured)", node) : name(at->second);
}

std::vector<PeerInfo> GrpcPeerTransport::Impl::peers() const {
  std::lock_guard lock(mutex_);
  std::vector<PeerInfo> all;
  for (const auto& [node, peer] : peers_) {
    PeerInfo info = peer.info;
    const bool up = peer.stream && peer.stream->greeted;
    info.state = up ? PeerState::kUp : peer.stub ? PeerState::kConnecting : PeerState::kWaiting;
    if (up) info.up_for_ns = static_cast<std::uint64_t>(now_ns() - peer.stream->since_ns);
    all.push_back(std::move(info));
  }
  return all;
}

// -- streams, with mutex_ held
// ---------------------------------------------------------------------

void GrpcPeerTransport::Impl::call(Peer& peer) {
  peer.call_at.reset();
  auto* stream = new CallingStream(*peer.stub, *this);  // deletes itself after on_done
  stream->node = peer.config.id;
  stream->since_ns = now_ns();
  streams_.insert(stream);
  peer.stream = stream;
  stream->start_read();
  enqueue(*stream, hello_);
  stream->StartCall();
}

void GrpcPeerTransport::Impl::enqueue(PeerStream& stream, v1::PeerMessage message) {
  stream.queue_bytes += message.ByteSizeLong();
  stream.queue.push_back(std::move(message));
  if (stream.writing) return;
  stream.writing = true;
  stream.start_write();
}

grpc::Status GrpcPeerTransport::Impl::judge_caller(const PeerHello& hello) {
  const auto at = peers_.find(hello.node);
  if (at == peers_.end()) {
    return {grpc::StatusCode::PERMISSION_DENIED,
            fmt::format("node {} does not know node {}: it is not among its configured peers",
                        options_.node, hello.node)};
  }
  Peer& peer = at->second;
  if (peer.stub) {
    return {grpc::StatusCode::PERMISSION_DENIED,
            fmt::format("node {} has the lower id and must wait to be called by node {}",
                        hello.node, options_.node)};
  }
  if (!peer.stream) return grpc::Status::OK;
  if (peer.stream->generation != hello.generation) {
    // A restarted peer's old stream ends at once or by keepalive; until then this may be a second
    // daemon with the same id, which must not take the first one's place.
    return {grpc::StatusCode::ALREADY_EXISTS,
            fmt::format("another daemon is connected as node {}; if it is gone, that is noticed "
                        "within seconds",
                        hello.node)};
  }
  end(*peer.stream, grpc::StatusCode::ABORTED, name(peer) + " has called again");
  return grpc::Status::OK;
}

void GrpcPeerTransport::Impl::greet(PeerStream& stream, PeerHello hello) {
  if (stream.calling) {
    if (hello.node != stream.node) {
      return end(stream, grpc::StatusCode::PERMISSION_DENIED,
                 fmt::format("{} says that it is node {}: check the peers' ids and addresses",
                             describe(stream.node), hello.node));
    }
  } else {
    const grpc::Status judged = judge_caller(hello);
    if (!judged.ok()) {
      logger_.write_limited("peer refused", LogLevel::kWarning,
                            fmt::format("refused a peer: {}", judged.error_message()),
                            {{"peer", std::to_string(hello.node)}});
      return end(stream, judged.error_code(), judged.error_message());
    }
    stream.node = hello.node;
    peers_.at(hello.node).stream = &stream;
    enqueue(stream, hello_);
  }
  Peer& peer = peers_.at(stream.node);
  stream.greeted = true;
  stream.generation = hello.generation;
  stream.since_ns = now_ns();
  peer.info.version = hello.version;
  peer.info.reason.clear();
  peer.said = false;
  sink_.peer_message(stream.node, std::move(hello));
}

void GrpcPeerTransport::Impl::detach(PeerStream& stream, const std::string& reason) {
  if (stream.detached) return;
  stream.detached = true;
  if (!stream.calling && !stream.greeted) return;  // never was a peer's
  Peer& peer = peers_.at(stream.node);
  peer.stream = nullptr;
  peer.info.reason = reason;
  const bool steady =
      stream.greeted && now_ns() - stream.since_ns > std::chrono::nanoseconds(kSteadyTime).count();
  if (steady) peer.backoff = std::chrono::milliseconds(0);
  if (!stream.greeted && !std::exchange(peer.said, true)) {
    // That a peer came or went is said by the control plane.
    logger_.write_limited("peer not reachable", LogLevel::kInfo,
                          fmt::format("{} is not reachable yet: {}", name(peer), reason),
                          {{"peer", std::to_string(stream.node)}});
  }
  if (stream.greeted) {
    ++peer.info.breaks;
    sink_.peer_down(stream.node, reason);
  }
  if (peer.stub) schedule_call(peer);
}

void GrpcPeerTransport::Impl::end(PeerStream& stream, grpc::StatusCode code,
                                  const std::string& reason) {
  detach(stream, reason);
  if (stream.calling) {
    stream.cancel();
  } else {
    stream.finish(grpc::Status(code, reason));
  }
}

void GrpcPeerTransport::Impl::schedule_call(Peer& peer) {
  if (state_ != State::kRunning) return;
  peer.backoff = std::clamp(peer.backoff * 2, options_.backoff_min, options_.backoff_max);
  // Half of it is chance, so that the daemons of a cluster do not call in step.
  std::uniform_real_distribution<double> jitter(0.5, 1.0);
  peer.call_at =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(
                         std::chrono::duration<double, std::milli>(peer.backoff) * jitter(random_));
  changed_.notify_all();
}

void GrpcPeerTransport::Impl::run_timers() {
  std::unique_lock lock(mutex_);
  while (state_ == State::kRunning) {
    std::optional<Clock::time_point> next;
    const auto now = Clock::now();
    const auto consider = [&next](Clock::time_point at) { next = next ? std::min(*next, at) : at; };
    for (auto& [node, peer] : peers_) {
      if (!peer.call_at) continue;
      if (*peer.call_at <= now) {
        call(peer);
      } else {
        consider(*peer.call_at);
      }
    }
    for (PeerStream* stream : streams_) {
      if (stream->detached || stream->greeted) continue;
      const auto due =
          Clock::time_point(std::chrono::nanoseconds(stream->since_ns)) + options_.hello_timeout;
      if (due <= now) {
        end(*stream, grpc::StatusCode::DEADLINE_EXCEEDED,
            fmt::format("no Hello came within {} ms", options_.hello_timeout.count()));
      } else {
        consider(due);
      }
    }
    if (next) {
      changed_.wait_until(lock, *next);
    } else {
      changed_.wait(lock);
    }
  }
}

// -- gRPC's threads
// --------------------------------------------------------------------------------

grpc::ServerBidiReactor<v1::PeerMessage, v1::PeerMessage>* GrpcPeerTransport::Impl::accept(
    grpc::CallbackServerContext& context) {
  std::lock_guard lock(mutex_);
  auto* stream = new CalledStream(context, *this);  // deletes itself after on_done
  stream->since_ns = now_ns();
  streams_.insert(stream);
  const auto ungreeted = std::count_if(streams_.begin(), streams_.end(), [](const PeerStream* one) {
    return !one->calling && !one->greeted;
  });
  if (state_ != State::kRunning) {
    end(*stream, grpc::StatusCode::UNAVAILABLE,
        fmt::format("node {} is {}", options_.node,
                    state_ == State::kNew ? "still starting" : "shutting down"));
  } else if (static_cast<std::size_t>(ungreeted) > kUngreetedMax) {
    end(*stream, grpc::StatusCode::RESOURCE_EXHAUSTED, "too many callers have not said Hello");
  } else {
    stream->start_read();
  }
  changed_.notify_all();  // a new Hello deadline
  return stream;
}

void GrpcPeerTransport::Impl::on_read(PeerStream& stream, bool ok) {
  std::lock_guard lock(mutex_);
  if (stream.detached) return;
  if (!ok) {
    stream.ended = true;
    stream.end_of_reads();
    if (stream.calling) return;  // on_done follows, with the peer's reason
    return end(stream, grpc::StatusCode::OK,
               stream.broken() ? "the connection broke, or nothing answers there any more"
                               : "it has closed the connection");
  }
  auto message = from_proto(stream.incoming);
  if (!message) {
    return end(stream, grpc::StatusCode::INVALID_ARGUMENT, message.error().message);
  }
  const bool is_hello = std::holds_alternative<PeerHello>(*message);
  if (is_hello == stream.greeted) {
    return end(stream, grpc::StatusCode::INVALID_ARGUMENT,
               is_hello ? "a second Hello on one stream" : "the first message was not Hello");
  }
  if (is_hello) {
    greet(stream, std::move(std::get<PeerHello>(*message)));
    if (stream.detached) return;
  } else {
    ++peers_.at(stream.node).info.messages_received;
    sink_.peer_message(stream.node, std::move(*message));
  }
  stream.incoming.Clear();
  stream.start_read();
}

void GrpcPeerTransport::Impl::on_written(PeerStream& stream, bool ok) {
  std::lock_guard lock(mutex_);
  stream.writing = false;
  stream.queue_bytes -= stream.queue.front().ByteSizeLong();
  stream.queue.pop_front();
  if (stream.detached) return stream.after_write();
  if (!ok) {
    if (!stream.calling) end(stream, grpc::StatusCode::UNAVAILABLE, "the connection broke");
    return;  // calling: on_done follows, with the reason
  }
  if (!stream.queue.empty() && !stream.ended) {
    stream.writing = true;
    stream.start_write();
  } else if (state_ == State::kStopping) {
    changed_.notify_all();
  }
}

void GrpcPeerTransport::Impl::on_done(PeerStream& stream, const grpc::Status& status) {
  std::lock_guard lock(mutex_);
  detach(stream,
         status.error_message().empty() ? "it has closed the connection" : status.error_message());
  streams_.erase(&stream);
  changed_.notify_all();
}

// -- the public face
// -------------------------------------------------------------------------------

GrpcPeerTransport::GrpcPeerTransport(PeerTransportOptions options, PeerSink& sink, Logger& logger)
    : impl_(std::make_unique<Impl>(std::move(options), sink, logger)) {}
GrpcPeerTransport::~GrpcPeerTransport() = default;
grpc::Service& GrpcPeerTransport::service() { return impl_->service(); }
void GrpcPeerTransport::start() { impl_->start(); }
void GrpcPeerTransport::stop() { impl_->stop(); }
std::vector<NodeId> GrpcPeerTransport::nodes() const { return impl_->nodes(); }
Status GrpcPeerTransport::send(NodeId node, const PeerMessage& message) {
  return impl_->send(node, message);
}
std::string GrpcPeerTransport::describe(NodeId node) const { return impl_->describe(node); }
void GrpcPeerTransport::disconnect(NodeId node, const std::string& reason) {
  impl_->disconnect(node, reason);
}
std::vector<PeerInfo> GrpcPeerTransport::peers() const { return impl_->peers(); }

}  // namespace mk::daemon
