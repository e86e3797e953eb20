/// \file
/// What mkerneld's main thread does while the daemon runs: it hears signals and talks to systemd.
#pragma once

#include <chrono>
#include <functional>

#include "daemon/config/config.h"
#include "daemon/service/daemon.h"
#include "daemon/service/log.h"
#include "daemon/service/process.h"

namespace mk::daemon {

/// Until SIGTERM or SIGINT, which it returns. Feeds systemd's watchdog while every thread of the
/// daemon makes progress, keeps the status line fresh, and on SIGHUP reloads what `load` answers.
int supervise(Daemon& daemon, Logger& logger, Signals& signals,
              const std::function<Result<Config>()>& load);

/// Tells systemd that a reload begins; "READY=1" ends it.
void announce_reload();

/// Tells systemd that the daemon stops and may take `drain` for it.
void announce_stop(std::chrono::nanoseconds drain);

}  // namespace mk::daemon
