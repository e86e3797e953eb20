/// \file
/// The daemon inside this process: a cluster of nodes without a daemon to start, for notebooks,
/// tests and one-process use. It runs mkerneld's own engine; libmkclient attaches to its nodes as
/// to any daemon.
///
///     auto cluster = mk::EmbeddedCluster::start({.nodes = 2});
///     mk::AttachOptions options{.socket = (*cluster)->socket_path(node), ...};
///     auto session = mk::Session::attach(options);
///
/// Link mkclient_embedded beside libmkclient. Ranks may be threads of this process or processes of
/// this machine.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "shm/host/expected.h"

namespace mk {

struct EmbeddedOptions {
  std::uint32_t nodes = 1;
  std::uint32_t rails = 1;          ///< of each node; a job's ranks take them in turn
  std::string fabric = "loopback";  ///< "loopback", or "ofi" (libfabric)
  std::string provider = "tcp";     ///< ofi: libfabric's provider
  std::string bind_address;  ///< ofi: local address or interface; empty: the provider's choice
  /// loopback: paces every link like a network of this speed; 0: as fast as memory.
  double link_bytes_per_second = 0;
  std::chrono::nanoseconds link_latency{0};
  /// How long a rail's thread polls hot after its last work before it begins to sleep.
  std::chrono::nanoseconds spin{50'000};
  /// How long the destructor waits for sessions to detach before it fails them.
  std::chrono::milliseconds drain_timeout{0};
};

/// The nodes. Their threads run from `start` to the destructor; all calls from any thread.
class EmbeddedCluster {
 public:
  static Result<std::unique_ptr<EmbeddedCluster>> start(const EmbeddedOptions& options);
  /// Fails sessions that are still attached (kDraining), and stops all nodes. In a child of fork(),
  /// which has none of them, it does nothing.
  ~EmbeddedCluster();
  EmbeddedCluster(const EmbeddedCluster&) = delete;
  EmbeddedCluster& operator=(const EmbeddedCluster&) = delete;

  std::uint32_t nodes() const;
  /// The client socket of a node, for AttachOptions::socket: a name in the abstract namespace,
  /// which leaves no file behind.
  const std::string& socket_path(std::uint32_t node) const;
  /// The network between the nodes, e.g. "loopback".
  const std::string& fabric() const;
  /// Stops one node, as if its daemon had been shut down; the other nodes go on. Idempotent.
  void stop_node(std::uint32_t node);

 private:
  class Impl;
  explicit EmbeddedCluster(std::unique_ptr<Impl> impl);

  std::unique_ptr<Impl> impl_;
};

}  // namespace mk
