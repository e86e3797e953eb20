/// \file
/// Daemons of one process as peers of each other, without a network: for embedded clusters and
/// tests.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "daemon/control/peer_transport.h"

namespace mk::daemon {

/// The shared medium between `nodes` daemons, numbered from 0. Two joined nodes have a stream
/// between them from the moment both have joined until one leaves or `disconnect`. Thread-safe;
/// outlives the transports' users.
class LocalCluster {
 public:
  explicit LocalCluster(std::uint32_t nodes);
  ~LocalCluster();

  /// The transport that node `node` sends by. Lives as long as the cluster.
  PeerTransport& transport(NodeId node);

  /// Node `node` receives from now on: streams to all joined nodes come up (unless `disconnect`
  /// keeps them down).
  void join(NodeId node, PeerSink& sink);
  /// Node `node` is gone: the others are told. After this returns, its sink is not used any more.
  void leave(NodeId node, const std::string& reason);

  /// Breaks the stream between two nodes, if any, tells both, and keeps it down.
  void disconnect(NodeId a, NodeId b, const std::string& reason);
  /// Allows the stream again; it comes up at once when both have joined.
  void connect(NodeId a, NodeId b);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace mk::daemon
