// A daemon's peer side without an engine: a sink that notes what it is told, the transport, a
// server on a Unix socket.
#pragma once

#include <grpcpp/grpcpp.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "daemon/service/grpc_peer_transport.h"
#include "daemon/service/grpc_server.h"
#include "tests/daemon/service/temp_folder.h"

namespace mk::daemon {

class RecordingSink final : public PeerSink {
 public:
  struct Event {
    NodeId node = 0;
    std::optional<PeerMessage> message;  ///< empty: down
    std::string reason;
    PeerSink::Taken taken = {};
  };

  explicit RecordingSink(PeerHello hello) : hello_(std::move(hello)) {}

  void peer_message(NodeId node, PeerMessage message, Taken taken) override {
    note({node, std::move(message), "", std::move(taken)});
  }
  void peer_down(NodeId node, std::string reason) override {
    note({node, std::nullopt, std::move(reason)});
  }
  const PeerHello& hello() const override { return hello_; }

  /// The next event, in order, which is then taken; empty when none comes.
  std::optional<Event> next(std::chrono::nanoseconds patience = kPatience) {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, patience, [this] { return taken_ < events_.size(); })) return {};
    Event event = events_[taken_++];
    lock.unlock();
    if (event.taken) event.taken();
    return event;
  }
  /// Skips to the next Hello of `node`; false when none comes.
  bool until_hello(NodeId node) {
    while (auto event = next()) {
      if (event->node == node && event->message &&
          std::holds_alternative<PeerHello>(*event->message)) {
        return true;
      }
    }
    return false;
  }
  /// Skips to the next end of a stream to `node`, and says why it ended.
  std::string until_down(NodeId node) {
    while (auto event = next()) {
      if (event->node == node && !event->message) return event->reason;
    }
    return "(never)";
  }
  std::vector<Event> events() {
    std::lock_guard lock(mutex_);
    return events_;
  }

 private:
  void note(Event event) {
    std::lock_guard lock(mutex_);
    events_.push_back(std::move(event));
    changed_.notify_all();
  }

  PeerHello hello_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Event> events_;
  std::size_t taken_ = 0;
};

/// One side. `folder`/N.sock is the address of node N.
class PeerRig {
 public:
  PeerRig(const TempFolder& folder, NodeId node, const std::vector<NodeId>& peers,
          std::uint64_t generation = 1, PeerTransportOptions options = {}, Logger& log = logger())
      : sink({.node = node,
              .generation = generation,
              .abi_major = 1,
              .version = "test",
              .fabric = "loopback",
              .rail_addresses = {{std::byte{1}}}}) {
    options.node = node;
    for (const NodeId peer : peers) options.peers.push_back({peer, address(folder, peer)});
    options.backoff_max = std::chrono::milliseconds(200);
    transport = std::make_unique<GrpcPeerTransport>(options, sink, log);
    auto listening = GrpcServer::listen(address(folder, node), {}, {&transport->service()});
    if (listening) server = std::move(*listening);
  }
  ~PeerRig() { stop(); }

  void start() { transport->start(); }
  void stop() {
    transport->stop();
    if (server) server->shutdown(std::chrono::system_clock::now());
  }

  static Address address(const TempFolder& folder, NodeId node) {
    return {.unix_socket = true, .path = folder / fmt::format("{}.sock", node)};
  }
  static Logger& logger() {
    static Logger quiet(LoggerOptions{.level = LogLevel::kError});
    return quiet;
  }

  RecordingSink sink;
  std::unique_ptr<GrpcPeerTransport> transport;
  std::unique_ptr<GrpcServer> server;
};

}  // namespace mk::daemon
