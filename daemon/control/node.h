/// \file
/// One daemon without its service: endpoints, one proxy per rail, and the control loop, composed.
/// mkerneld puts gRPC around it (peer transport, Admin); embedded clusters and tests host several
/// in one process.
///
///   auto node = Node::create(options);              // devices opened, client socket bound;
///   nothing runs GrpcPeerTransport peers(config, (*node)->peer_sink());
///   (*node)->start(peers);                          // proxies and control thread run; clients are
///   served
///   ...
///   (*node)->stop(deadline);                        // drains; afterwards `peers` is no longer
///   used
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "daemon/control/control_loop.h"
#include "daemon/control/control_plane.h"
#include "daemon/fabric/fabric.h"
#include "daemon/proxy/proxy.h"

namespace mk::daemon {

/// One rail: a NIC and the thread that serves it. `endpoint.rail` and `proxy.rail` are set by Node.
struct RailOptions {
  fabric::EndpointConfig endpoint;
  ProxyOptions proxy;
};

struct NodeOptions {
  ControlOptions control;
  ControlLoopOptions loop;
  std::vector<RailOptions> rails = {RailOptions{}};  ///< index = rail; at least one
};

/// The step that a shutdown is at, to explain why it takes long: "the control thread".
using StopPhase = std::atomic<const char*>;

class Node {
 public:
  /// Opens the endpoints and binds the client socket.
  static Result<std::unique_ptr<Node>> create(NodeOptions options);
  /// Stops without draining, if it still runs.
  ~Node();

  /// Starts the proxies and the control thread. `peers` is used until `stop` has returned.
  Status start(PeerTransport& peers);

  /// Refuses new attaches from now on (kDraining); running jobs go on. From any thread.
  void drain(const std::string& reason = "is shutting down");
  /// Takes new attaches again. From any thread.
  void resume();
  /// Drains, waits until the last session is gone or `deadline`, fails those left (kDraining), and
  /// stops everything. Idempotent. Not from the control thread. `phase`: where to say what it is
  /// at.
  void stop(std::chrono::steady_clock::time_point deadline, StopPhase* phase = nullptr);

  /// What peers send goes here. Usable from `create` on; `hello()` is valid then, too.
  PeerSink& peer_sink();
  ControlLoop& loop();
  /// A copy of the state; kUnavailable when not running. From any thread but the control thread.
  Result<ControlSnapshot> snapshot();

  NodeId id() const;
  std::uint64_t generation() const;
  const std::string& socket_path() const;
  std::uint32_t rails() const;
  const fabric::Capabilities& capabilities(std::uint32_t rail) const;
  /// Counters of a rail's proxy; valid as long as the node.
  const ProxyStats& proxy_stats(std::uint32_t rail) const;
  /// A rail's recorder; for one thread at a time.
  TraceBuffer& trace(std::uint32_t rail);

 private:
  class Impl;
  explicit Node(std::unique_ptr<Impl> impl);

  std::unique_ptr<Impl> impl_;
};

}  // namespace mk::daemon
