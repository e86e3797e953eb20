/// \file
/// A whole daemon: the engine, its peers and its gRPC server, started and stopped in the right
/// order.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "daemon/config/config.h"
#include "daemon/control/node.h"
#include "daemon/service/log.h"

namespace mk::daemon {

/// The engine's options of a configuration. `logger` outlives the node.
NodeOptions node_options(const Config& config, Logger& logger);

class Daemon {
 public:
  /// When it returns, clients, peers and tools are served. On an error nothing is left behind.
  /// `logger` outlives this.
  static Result<std::unique_ptr<Daemon>> start(const Config& config, Logger& logger);
  ~Daemon();  ///< stops at once if it still runs

  /// Where it listens, with the real port.
  std::string listen() const;
  Node& node();

  /// Refuses new sessions and says so to health checks; the rest goes on. Any thread.
  void drain();
  /// Drains, waits for the sessions to end until `deadline`, fails those left, and stops. Once.
  void stop(std::chrono::steady_clock::time_point deadline);

 private:
  class Impl;
  explicit Daemon(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace mk::daemon
