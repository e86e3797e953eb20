/// \file
/// A whole daemon: the engine, its peers and its gRPC server, started and stopped in the right
/// order.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "daemon/config/config.h"
#include "daemon/control/node.h"
#include "daemon/service/log.h"
#include "daemon/service/watchdog.h"
#include "shm/host/unique_fd.h"

namespace mk::daemon {

/// What became of a reload, as a sentence for users.
struct ReloadReport {
  bool refused = false;
  std::string text;
};

class Daemon {
 public:
  struct WaitEnd {
    bool go_on = true;             ///< false: nobody wants the daemon any more
    std::string refused_reload{};  ///< why a new configuration was refused meanwhile; empty: none
  };
  /// Told what the daemon waits for, a sentence. Returns when it is time for another look.
  using Wait = std::function<WaitEnd(const std::string& what)>;

  /// When it returns, clients, peers and tools are served. On an error nothing is left behind.
  /// `logger` outlives this. `client_socket` listens at socket.path already (systemd); when it is
  /// invalid, the daemon binds its own.
  /// A device, port or address that is not there yet is an error without `wait`. With it, the
  /// daemon looks again and again, and tells tools meanwhile that it is not ready, and why. The
  /// error is kAborted when `wait` ends that.
  static Result<std::unique_ptr<Daemon>> start(const Config& config, Logger& logger,
                                               UniqueFd client_socket = {}, Wait wait = {});
  ~Daemon();  ///< stops at once if it still runs

  /// Where it listens, with the real port.
  std::string listen() const;
  /// Where it serves metrics, with the real port; empty: nowhere.
  std::string metrics_listen() const;
  Node& node();

  /// Takes a freshly loaded configuration over, all of it or nothing: it is refused when loading it
  /// failed, or when a key differs that only a restart changes. One call at a time.
  ReloadReport reload(const Result<Config>& loaded);
  /// What is in effect.
  Config config() const;
  /// Where it came from, for users who ask what the file would change. `load` is called on the
  /// server's threads.
  void set_config_source(const std::string& file, std::function<Result<Config>()> load);

  /// Threads that make progress in an idle daemon, too: the proxy threads and the control thread.
  std::vector<Progress> progress();
  /// One line for `systemctl status`.
  std::string status_text();

  /// Refuses new sessions and says so to health checks; the rest goes on. Any thread.
  void drain();
  /// Drains, waits for the sessions to end until `deadline`, fails those left, and stops. Once.
  /// `phase`: where to say what it is at.
  void stop(std::chrono::steady_clock::time_point deadline, StopPhase* phase = nullptr);

 private:
  class Impl;
  explicit Daemon(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace mk::daemon
