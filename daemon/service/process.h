/// \file
/// What a process owes its surroundings: resource limits, signals, systemd, and its parent.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "daemon/service/log.h"
#include "shm/host/result.h"
#include "shm/host/unique_fd.h"

namespace mk::daemon {

/// Ignores SIGPIPE, raises the limit of open files as far as allowed, warns when little memory may
/// be locked (fabrics that register memory need it), sets memory aside for the control path, and
/// takes signals back from libraries (`fabric/library_signals.h`). Before any thread.
void prepare_process(Logger& logger);

/// How many files this process may have open.
std::uint64_t open_files_max();

/// SIGTERM and SIGINT ask for an orderly stop, SIGHUP for a reload of the configuration.
class Signals {
 public:
  /// Blocks them; before any thread is started, since threads inherit it.
  Signals();
  /// Waits for one, at most `patience`; nullopt when none came.
  std::optional<int> wait(std::chrono::nanoseconds patience);
  /// From now on, SIGTERM and SIGINT end the process at once with exit code 1.
  void end_at_once();
};

/// "SIGTERM"
std::string signal_name(int signal);

/// Tells systemd, if it asked ($NOTIFY_SOCKET): lines such as "READY=1\nSTATUS=serving".
void notify_systemd(const std::string& lines);

/// How often systemd wants to hear WATCHDOG=1 ($WATCHDOG_USEC); 0: it does not.
std::chrono::nanoseconds watchdog_interval();

/// The listening client socket that systemd holds for us (mkerneld.socket); an invalid descriptor
/// when it holds none. An error when what it handed over is no stream socket at `path`.
Result<UniqueFd> take_activated_socket(const std::string& path);

/// One line of JSON for the parent process: node, pid, listen (with the real port), socket, and
/// metrics if they are served.
std::string ready_line(unsigned node, const std::string& listen, const std::string& socket,
                       const std::string& metrics);
/// Writes it to a descriptor, and closes that.
Status write_ready_fd(int fd, const std::string& line);
/// Writes it to a file, which appears whole or not at all.
Status write_ready_file(const std::string& path, const std::string& line);

}  // namespace mk::daemon
