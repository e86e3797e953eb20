/// \file
/// What a process owes its surroundings: resource limits, signals, systemd, and whoever started it.
#pragma once

#include <string>

#include "daemon/service/log.h"
#include "shm/host/result.h"

namespace mk::daemon {

/// Ignores SIGPIPE, raises the limit of open files as far as allowed, and warns when little memory
/// may be locked (fabrics that register memory need it). Before any thread.
void prepare_process(Logger& logger);

/// SIGTERM, SIGINT and SIGHUP ask for an orderly stop.
class StopSignals {
 public:
  /// Blocks them; before any thread is started, since threads inherit it.
  StopSignals();
  /// Waits for one and returns its name. From then on, a second one ends the process at once with
  /// exit code 1.
  std::string wait();
};

/// Tells systemd, if it asked ($NOTIFY_SOCKET): lines such as "READY=1\nSTATUS=serving".
void notify_systemd(const std::string& lines);

/// One line of JSON for whoever started us: node, pid, listen (with the real port), socket.
std::string ready_line(unsigned node, const std::string& listen, const std::string& socket);
/// Writes it to a descriptor, and closes that.
Status write_ready_fd(int fd, const std::string& line);
/// Writes it to a file, which appears whole or not at all.
Status write_ready_file(const std::string& path, const std::string& line);

}  // namespace mk::daemon
