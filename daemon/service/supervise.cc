#include "daemon/service/supervise.h"

#include <fmt/format.h>
#include <signal.h>

#include <algorithm>

#include "daemon/service/watchdog.h"
#include "shm/host/segment.h"

namespace mk::daemon {
namespace {

using std::chrono::nanoseconds;

constexpr nanoseconds kStatusInterval = std::chrono::seconds(5);
constexpr nanoseconds kFlushTime = std::chrono::seconds(1);
/// What a stop takes beside the draining: see ControlLoop::stop and the gRPC server's grace.
constexpr nanoseconds kStopExtra = std::chrono::seconds(10);

class Supervisor {
 public:
  Supervisor(Daemon& daemon, Logger& logger, const std::function<Result<Config>()>& load)
      : daemon_(daemon),
        logger_(logger),
        load_(load),
        watchdog_interval_(watchdog_interval()),
        status_(daemon.status_text()) {}

  /// Three looks per watchdog interval: one late one does not cost the daemon its life.
  nanoseconds interval() const {
    if (watchdog_interval_.count() == 0) return kStatusInterval;
    return std::min(kStatusInterval, watchdog_interval_ / 3);
  }

  void tick() {
    logger_.tell_held_back();
    std::string lines;
    if (watchdog_interval_.count() > 0) {
      if (watchdog_.all_moved(daemon_.progress())) {
        lines = "WATCHDOG=1\n";
      } else {
        logger_.write_limited(
            "watchdog", LogLevel::kError,
            fmt::format("no progress since the last look, systemd's watchdog is not fed: {}",
                        fmt::join(watchdog_.stalled(), ", ")));
      }
    }
    std::string status = daemon_.status_text();
    if (status != status_) lines += "STATUS=" + status;
    status_ = std::move(status);
    if (!lines.empty()) notify_systemd(lines);
  }

  void reload() {
    announce_reload();
    const ReloadReport report = daemon_.reload(load_());
    logger_.write(report.refused ? LogLevel::kError : LogLevel::kInfo, "SIGHUP: " + report.text);
    logger_.flush(kFlushTime);  // who hears READY may read the log
    status_ = daemon_.status_text();
    notify_systemd("READY=1\nSTATUS=" + status_);
  }

 private:
  Daemon& daemon_;
  Logger& logger_;
  const std::function<Result<Config>()>& load_;
  const nanoseconds watchdog_interval_;
  Watchdog watchdog_;
  std::string status_;
};

}  // namespace

int supervise(Daemon& daemon, Logger& logger, Signals& signals,
              const std::function<Result<Config>()>& load) {
  Supervisor supervisor(daemon, logger, load);
  while (true) {
    supervisor.tick();
    const auto signal = signals.wait(supervisor.interval());
    if (signal == SIGHUP) {
      supervisor.reload();
    } else if (signal) {
      return *signal;
    }
  }
}

void announce_reload() {
  notify_systemd(fmt::format("RELOADING=1\nMONOTONIC_USEC={}", shm::monotonic_ns() / 1000));
}

void announce_stop(nanoseconds drain) {
  const auto allowed = std::chrono::duration_cast<std::chrono::microseconds>(drain + kStopExtra);
  notify_systemd(fmt::format(
      "STOPPING=1\nEXTEND_TIMEOUT_USEC={}\nSTATUS=waiting for sessions to end", allowed.count()));
}

}  // namespace mk::daemon
