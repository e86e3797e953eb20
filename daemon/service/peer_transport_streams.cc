#include <algorithm>
#include <utility>

#include "daemon/rpc/grpc_channel.h"
#include "daemon/service/peer_convert.h"
#include "daemon/service/peer_transport_impl.h"
#include "shm/host/text.h"

namespace mk::daemon {
namespace {

constexpr auto kSteadyTime = std::chrono::seconds(2);  ///< up so long: the next break is a new one
constexpr std::size_t kUngreetedMax = 256;
/// A peer that sends no more says why in a moment. One that has sent what is no message, or a
/// network that lost a piece of it, never does.
constexpr auto kLastWordTime = std::chrono::seconds(1);
/// Of the reason that a stream ends with: HTTP/2 carries it in a header, and long ones not at all.
constexpr std::size_t kReasonBytesMax = 1024;

}  // namespace

// -- streams, with mutex_ held ----------------------------------------------------------------

void GrpcPeerTransport::Impl::call(Peer& peer) {
  peer.call_at.reset();
  renew_tls(peer);
  auto* stream = new CallingStream(*peer.stub, *this);  // deleted in on_done
  stream->node = peer.config.id;
  stream->since_ns = peer_clock_ns();
  streams_.insert(stream);
  peer.stream = stream;
  stream->start_read();
  enqueue(*stream, to_proto(sink_.hello_for(peer.config.id)));
  stream->StartCall();
}

void GrpcPeerTransport::Impl::enqueue(PeerStream& stream, v1::PeerMessage message) {
  stream.queue_bytes += message.ByteSizeLong();
  stream.queue.push_back(std::move(message));
  if (stream.writing) return;
  stream.writing = true;
  stream.start_write();
}

grpc::Status GrpcPeerTransport::Impl::judge_caller(const PeerStream& stream,
                                                   const PeerHello& hello) {
  const auto at = peers_.find(hello.node);
  if (at == peers_.end()) {
    return {grpc::StatusCode::PERMISSION_DENIED,
            fmt::format("node {} does not know node {}: {}", options_.node, hello.node,
                        options_.discovers ? "discovery has not found it yet"
                                           : "it is not among its configured peers")};
  }
  Peer& peer = at->second;
  // Any certificate of the CA opens a connection; a node is spoken for with its own.
  const std::string& expected =
      peer.config.name.empty() ? peer.config.address.host : peer.config.name;
  if (const auto names = stream.certificate_names(); names && !names_match(*names, expected)) {
    return {grpc::StatusCode::PERMISSION_DENIED,
            fmt::format("the certificate of '{}' does not speak for node {}, which is known here "
                        "as '{}' ([[peer]] address or name)",
                        fmt::join(*names, "', '"), hello.node, expected)};
  }
  if (peer.stub) {
    return {grpc::StatusCode::PERMISSION_DENIED,
            fmt::format("node {} has the lower id and must wait to be called by node {}",
                        hello.node, options_.node)};
  }
  if (!peer.stream && too_much_unread(peer)) {
    return {
        grpc::StatusCode::RESOURCE_EXHAUSTED,
        fmt::format("node {} has not yet handled all that the last connection of node {} brought",
                    options_.node, hello.node)};
  }
  if (!peer.stream) return grpc::Status::OK;
  if (peer.stream->generation != hello.generation) {
    // A restarted peer's old stream ends at once or by keepalive; until then this may be a second
    // daemon with the same id, which must not take the first one's place.
    return {grpc::StatusCode::ALREADY_EXISTS,
            fmt::format("node id {} is already in use by a daemon that is connected to node {} and "
                        "belongs at {}: give one of the two another id; after a restart, this "
                        "ends by itself within seconds",
                        hello.node, options_.node, peer.config.address.text())};
  }
  end(*peer.stream, grpc::StatusCode::ABORTED, name(peer) + " has called again");
  return grpc::Status::OK;
}

void GrpcPeerTransport::Impl::greet(PeerStream& stream, PeerHello hello, std::size_t bytes) {
  if (stream.calling) {
    if (hello.node != stream.node) {
      return end(stream, grpc::StatusCode::PERMISSION_DENIED,
                 fmt::format("{} says that it is node {}: check the peers' ids and addresses",
                             name(peers_.at(stream.node)), hello.node));
    }
  } else {
    const grpc::Status judged = judge_caller(stream, hello);
    if (!judged.ok()) {
      log_refusal(stream, hello.node, judged.error_message());
      return end(stream, judged.error_code(), judged.error_message());
    }
    stream.node = hello.node;
    peers_.at(hello.node).stream = &stream;
    enqueue(stream, to_proto(sink_.hello_for(hello.node)));
  }
  Peer& peer = peers_.at(stream.node);
  stream.greeted = true;
  stream.generation = hello.generation;
  stream.since_ns = peer_clock_ns();
  peer.info.version = hello.version;
  peer.info.reason.clear();
  peer.certificate_trouble.clear();
  peer.said = false;
  peer.refused.clear();
  hand_over(peer, std::move(hello), bytes);
}

void GrpcPeerTransport::Impl::log_refusal(const PeerStream& stream, NodeId node,
                                          const std::string& reason) {
  // A refused peer calls again and again. Its reason is logged once, until it changes.
  if (const auto known = peers_.find(node); known != peers_.end()) {
    if (known->second.refused == reason) return;
    known->second.refused = reason;
  }
  const std::string remote = stream.remote();  // gRPC names a Unix socket by a number: "fd:12"
  logger_.write_limited("peer refused", LogLevel::kWarning,
                        fmt::format("refused a peer at {}: {}",
                                    remote.starts_with("fd:") ? "a Unix socket" : remote, reason),
                        {{"peer", std::to_string(node)}, {"remote", remote}});
}

void GrpcPeerTransport::Impl::hand_over(Peer& peer, PeerMessage message, std::size_t bytes) {
  ++peer.unread_messages;
  peer.unread_bytes += bytes;
  const NodeId node = peer.config.id;
  sink_.peer_message(node, std::move(message), [this, node, bytes] { on_taken(node, bytes); });
}

void GrpcPeerTransport::Impl::read_on(Peer& peer, PeerStream& stream) {
  stream.paused = too_much_unread(peer);
  if (!stream.paused) stream.start_read();
}

void GrpcPeerTransport::Impl::on_taken(NodeId node, std::size_t bytes) {
  std::lock_guard lock(mutex_);
  const auto at = peers_.find(node);
  if (at == peers_.end()) return;
  Peer& peer = at->second;
  // A node that left and came back has begun to count anew.
  peer.unread_messages -= std::min<std::size_t>(peer.unread_messages, 1);
  peer.unread_bytes -= std::min(peer.unread_bytes, bytes);
  PeerStream* const stream = peer.stream;
  if (stream != nullptr && stream->paused && !stream->detached && !stream->ended) {
    read_on(peer, *stream);
  }
}

void GrpcPeerTransport::Impl::detach(PeerStream& stream, const std::string& reason) {
  if (stream.detached) return;
  stream.detached = true;
  const auto up_for = std::chrono::nanoseconds(peer_clock_ns() - stream.since_ns);
  stream.since_ns = peer_clock_ns();
  stream.queue.resize(stream.writing ? 1 : 0);     // the rest is not sent any more
  changed_.notify_all();                           // the deadline of its winding down
  if (!stream.calling && !stream.greeted) return;  // never was a peer's
  Peer& peer = peers_.at(stream.node);
  peer.stream = nullptr;
  peer.info.reason = reason;
  if (stream.greeted && up_for > kSteadyTime) peer.backoff = std::chrono::milliseconds(0);
  if (!stream.greeted && !std::exchange(peer.said, true)) {
    // That a peer came or went is said by the control plane.
    logger_.write_limited("peer not reachable", LogLevel::kInfo,
                          fmt::format("{} is not reachable yet: {}", name(peer), reason),
                          {{"peer", std::to_string(stream.node)}});
  }
  if (stream.greeted) {
    ++peer.info.breaks;
    peer.down_since_ns = peer_clock_ns();
    sink_.peer_down(stream.node, reason);
  }
  // A peer that leaves or is elsewhere now is settled by the timers' thread.
  if (peer.stub && !peer.leaves && !peer.elsewhere) schedule_call(peer);
}

void GrpcPeerTransport::Impl::end(PeerStream& stream, grpc::StatusCode code,
                                  const std::string& text) {
  const std::string reason = shm::plain_text(text, kReasonBytesMax);
  detach(stream, reason);
  if (stream.calling) {
    stream.cancel();
  } else {
    stream.finish(grpc::Status(code, reason));
  }
}

void GrpcPeerTransport::Impl::schedule_call(Peer& peer) {
  if (state_ != State::kRunning) return;
  tls_.renew();  // during the pause
  peer.backoff = std::clamp(peer.backoff * 2, options_.backoff_min, options_.backoff_max);
  // Half of it is chance, so that the daemons of a cluster do not call in step.
  std::uniform_real_distribution<double> jitter(0.5, 1.0);
  peer.call_at = PeerClock::now() +
                 std::chrono::duration_cast<PeerClock::duration>(
                     std::chrono::duration<double, std::milli>(peer.backoff) * jitter(random_));
  changed_.notify_all();
}

void GrpcPeerTransport::Impl::run_timers() {
  std::unique_lock lock(mutex_);
  while (state_ == State::kRunning) {
    bury_retired();
    if (std::any_of(peers_.begin(), peers_.end(), [](const auto& entry) {
          const Peer& peer = entry.second;
          return !peer.stream && (peer.leaves || peer.elsewhere);
        })) {
      settle_peers();
    }
    std::optional<PeerClock::time_point> next;
    const auto now = PeerClock::now();
    const auto consider = [&next](PeerClock::time_point at) {
      next = next ? std::min(*next, at) : at;
    };
    for (auto& [node, peer] : peers_) {
      if (!peer.call_at) continue;
      if (*peer.call_at <= now) {
        call(peer);
      } else {
        consider(*peer.call_at);
      }
    }
    for (PeerStream* stream : streams_) {
      if (stream->greeted && !stream->detached && !stream->ended) continue;
      const bool last_word = stream->ended && !stream->detached;
      const auto due = PeerClock::time_point(std::chrono::nanoseconds(
                           last_word ? stream->ended_ns : stream->since_ns)) +
                       (last_word ? kLastWordTime : PeerClock::duration(options_.hello_timeout));
      if (due > now) {
        consider(due);
      } else if (stream->detached) {  // its peer does not even take the end of it
        stream->cancel();
        stream->since_ns = peer_clock_ns();
      } else if (last_word) {
        end(*stream, grpc::StatusCode::INTERNAL,
            "nothing more can be read from it or written to it, and it does not say why");
      } else {
        end(*stream, grpc::StatusCode::DEADLINE_EXCEEDED,
            fmt::format("no Hello came within {} ms", options_.hello_timeout.count()));
      }
    }
    if (next) {
      changed_.wait_until(lock, *next);
    } else {
      changed_.wait(lock);
    }
  }
}

// -- gRPC's threads ---------------------------------------------------------------------------

grpc::ServerBidiReactor<v1::PeerMessage, v1::PeerMessage>* GrpcPeerTransport::Impl::accept(
    grpc::CallbackServerContext& context) {
  std::lock_guard lock(mutex_);
  auto* stream = new CalledStream(context, *this);  // deleted in on_done
  stream->since_ns = peer_clock_ns();
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
    note_ended(stream);
    if (stream.calling) return stream.end_of_reads();  // on_done follows, with the peer's reason
    return end(stream, grpc::StatusCode::OK,
               stream.broken() ? "the connection broke, or nothing answers there any more"
                               : "it closed the connection or sent a malformed message");
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
  const std::size_t bytes = stream.incoming.ByteSizeLong();
  stream.incoming.Clear();
  if (is_hello) {
    greet(stream, std::move(std::get<PeerHello>(*message)), bytes);
    if (stream.detached) return;
  } else {
    Peer& peer = peers_.at(stream.node);
    ++peer.info.messages_received;
    hand_over(peer, std::move(*message), bytes);
  }
  read_on(peers_.at(stream.node), stream);
}

void GrpcPeerTransport::Impl::note_ended(PeerStream& stream) {
  if (std::exchange(stream.ended, true)) return;
  stream.ended_ns = peer_clock_ns();
  changed_.notify_all();  // the deadline of its last word
}

void GrpcPeerTransport::Impl::on_written(PeerStream& stream, bool ok) {
  std::lock_guard lock(mutex_);
  stream.writing = false;
  stream.queue_bytes -= stream.queue.front().ByteSizeLong();
  stream.queue.pop_front();
  if (stream.detached) return stream.after_write();
  if (!ok) {
    if (!stream.calling) {
      return end(stream, grpc::StatusCode::UNAVAILABLE, "the connection broke");
    }
    return note_ended(stream);  // on_done follows, with the reason
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
  delete &stream;
  changed_.notify_all();
}

}  // namespace mk::daemon
