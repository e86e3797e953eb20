// mkerneld: reads its configuration, starts a Daemon, attends it until a signal, stops it.
//
// Exit codes: 0 stopped as asked, or the configuration is good; 1 could not start or run; 2 usage
// or configuration.
#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <optional>
#include <variant>

#include "daemon/config/config.h"
#include "daemon/discovery/bystander.h"
#include "daemon/doctor/checks.h"
#include "daemon/doctor/probe.h"
#include "daemon/service/admin_listen.h"
#include "daemon/service/daemon.h"
#include "daemon/service/grpc_server.h"
#include "daemon/service/log.h"
#include "daemon/service/process.h"
#include "daemon/service/stop_guard.h"
#include "daemon/service/supervise.h"
#include "daemon/service/version.h"
#include "daemon/tls/own_files.h"
#include "shm/files/standard_output.h"

namespace mk::daemon {
namespace {

constexpr int kExitFailure = 1;
constexpr int kExitUsage = 2;
/// For all of a shutdown but the sessions' time to end; an ordinary one takes milliseconds. Below
/// systemd's TimeoutStopSec.
constexpr std::chrono::seconds kStopTime(15);
/// Between two looks for a device or an address that is not there yet.
constexpr std::chrono::nanoseconds kWaitPause = std::chrono::seconds(1);

struct Flags {
  std::string config;
  ConfigOverrides overrides;
  bool check_config = false;
  bool doctor = false;
  bool json = false;
  int ready_fd = -1;
  std::string ready_file;
};

void declare(CLI::App& app, Flags& flags) {
  ConfigOverrides& over = flags.overrides;
  app.footer(
      "Examples:\n"
      "  mkerneld --config /etc/mkernel/mkerneld.toml --check-config\n"
      "  mkerneld --config /etc/mkernel/mkerneld.toml\n\n"
      "Defaults of the configuration: mkerneld.toml(5), or --check-config.\n"
      "Exit status: 0 stopped as asked, 1 could not start or run, 2 usage or configuration.\n"
      "See mkerneld(8).");
  app.add_option("--config", flags.config, "Configuration file (TOML); see mkerneld.toml.example")
      ->envname("MKERNELD_CONFIG");
  app.add_flag(
      "--check-config", flags.check_config,
      "Check the configuration and its certificates, print what is in effect, and exit (0 good, "
      "2 not)");
  app.add_flag(
      "--doctor", flags.doctor,
      "Check this machine by that configuration, say what to mend, and exit (1: a failure)");
  app.add_flag("--json", flags.json, "With --doctor: JSON");
  app.add_option("--node-id", over.node_id, "Number of this daemon in the cluster");
  app.add_option("--listen", over.listen,
                 "Address for peers and mkctl: HOST:PORT (port 0: any) or unix:/PATH");
  app.add_option("--advertise", over.advertise, "Address at which others reach this daemon");
  app.add_option("--socket", over.socket, "Unix socket that clients attach to");
  app.add_option("--peer", over.peers, "Another daemon, ID=ADDRESS; may be given several times")
      ->allow_extra_args(false);
  app.add_option("--fabric", over.fabric, "auto, loopback, verbs, ofi or null");
  app.add_option("--rails", over.rails, "Endpoints and proxy threads, 1 to 16, or auto");
  app.add_option("--link-bandwidth", over.link_bandwidth, "Pace of a loopback link, e.g. 2GB/s");
  app.add_option("--link-latency", over.link_latency, "Latency of a loopback link, e.g. 5us");
  app.add_option("--log-level", over.log_level, "debug, info, warning or error");
  app.add_option("--log-format", over.log_format, "auto, text, json or journald");
  app.add_flag("--insecure", over.insecure, "Allow other machines without TLS");
  app.add_option(
      "--ready-fd", flags.ready_fd,
      "When ready, write one line of JSON (node, pid, listen, socket) to this descriptor");
  app.add_option("--ready-file", flags.ready_file, "The same, to a file");
  app.set_version_flag("--version", version_text());
}

int usage(const CLI::ParseError& error, const CLI::App& app) {
  if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
  fmt::print(stderr, "mkerneld: {}\nTry `mkerneld --help`.\n", error.what());
  return kExitUsage;
}

Status announce(const Flags& flags, const Config& config, Daemon& daemon) {
  const std::string line =
      ready_line(config.node_id, daemon.listen(), config.socket.path, daemon.metrics_listen());
  if (flags.ready_fd >= 0) MK_RETURN_IF_ERROR(write_ready_fd(flags.ready_fd, line));
  if (!flags.ready_file.empty()) MK_RETURN_IF_ERROR(write_ready_file(flags.ready_file, line));
  notify_systemd("READY=1\nSTATUS=" + daemon.status_text());
  return {};
}

int fail_with(const Error& error, Logger& logger) {
  logger.write(LogLevel::kError, error.message, {{"code", error_code_name(error.code)}});
  notify_systemd("STATUS=" + error.message);
  return kExitFailure;
}

/// Waits with a daemon that cannot start yet.
class Patience {
 public:
  Patience(const Flags& flags, Logger& logger, Signals& signals)
      : flags_(flags), logger_(logger), signals_(signals) {
    const std::chrono::nanoseconds watchdog = watchdog_interval();
    if (watchdog.count() > 0) pause_ = std::min(pause_, watchdog / 3);
  }

  /// Says what the daemon waits for. For systemd it has started, so that boot and apt go on and a
  /// reload comes through; tools hear that it takes no jobs. A signal ends the wait: for ever, or
  /// for a start with another configuration.
  Daemon::WaitEnd wait(const std::string& what) {
    if (said_ != what) logger_.write(LogLevel::kWarning, what);
    said_ = what;
    notify_systemd("READY=1\nWATCHDOG=1\nSTATUS=" + what);
    const auto signal = signals_.wait(pause_);
    if (!signal) return {.go_on = true};
    if (*signal != SIGHUP) return {.go_on = false};
    announce_reload();  // until the next look, or until the daemon runs
    auto loaded = load_config(flags_.config, flags_.overrides);
    if (loaded) {
      other_ = std::move(*loaded);
      return {.go_on = false};
    }
    const std::string refused = fmt::format(
        "the configuration is kept, since the new one is not valid: {}", loaded.error().message);
    logger_.write(LogLevel::kError, "SIGHUP: " + refused);
    return {.go_on = true, .refused_reload = refused};
  }
  /// Read at a SIGHUP meanwhile.
  const std::optional<Config>& other() const { return other_; }

 private:
  const Flags& flags_;
  Logger& logger_;
  Signals& signals_;
  std::chrono::nanoseconds pause_ = kWaitPause;
  std::string said_;
  std::optional<Config> other_;
};

/// Runs a daemon. Its exit code, or the configuration to start it with instead: one that was
/// corrected while the daemon waited. `socket` stays the caller's.
std::variant<int, Config> serve(const Flags& flags, const Config& config, const UniqueFd& socket,
                                Logger& logger, Signals& signals) {
  UniqueFd listening;
  if (socket.valid()) {
    listening = UniqueFd(::fcntl(socket.get(), F_DUPFD_CLOEXEC, 0));
    if (!listening.valid()) {
      return fail_with({ErrorCode::kSystem, "cannot keep the client socket: " + errno_text(errno)},
                       logger);
    }
  }
  Patience patience(flags, logger, signals);
  auto daemon = Daemon::start(config, logger, std::move(listening),
                              [&patience](const std::string& what) { return patience.wait(what); });
  if (!daemon && daemon.error().code == ErrorCode::kAborted) {
    if (patience.other()) {
      logger.write(LogLevel::kInfo, "SIGHUP: the configuration is reloaded; starting anew");
      return *patience.other();
    }
    logger.write(LogLevel::kInfo, daemon.error().message);
    return 0;
  }
  if (!daemon) return fail_with(daemon.error(), logger);
  logger.write(
      LogLevel::kInfo,
      fmt::format("mkerneld {} is ready: clients at {}, peers and tools at {}", version_text(),
                  config.socket.path, (*daemon)->listen()),
      {{"fabric", config.fabric.name}, {"rails", std::to_string((*daemon)->node().rails())}});
  logger.flush(std::chrono::seconds(1));  // who hears that it is ready may read the log
  if (const Status status = announce(flags, config, **daemon); !status) {
    return fail_with(status.error(), logger);
  }

  const auto load = [flags] { return load_config(flags.config, flags.overrides); };
  (*daemon)->set_config_source(flags.config, load);
  const int signal = supervise(**daemon, logger, signals, load);
  const std::chrono::nanoseconds drain((*daemon)->config().limits.drain_ns);
  announce_stop(drain);
  signals.end_at_once();
  logger.write(LogLevel::kInfo,
               fmt::format("{}: stopping; sessions have {:.1f} s to end", signal_name(signal),
                           std::chrono::duration<double>(drain).count()));
  {
    StopPhase phase = "its threads";
    const StopGuard guard(drain + kStopTime, phase, [&logger](const std::string& why) {
      logger.write(LogLevel::kError, why);
      logger.flush(std::chrono::seconds(1));
      ::_exit(kExitFailure);
    });
    (*daemon)->stop(std::chrono::steady_clock::now() + drain, &phase);
    phase = "what its threads leave";
    daemon->reset();
  }
  if (!flags.ready_file.empty()) ::unlink(flags.ready_file.c_str());
  logger.write(LogLevel::kInfo, "stopped");
  return 0;
}

/// What a daemon would start with, and whether its certificates and admin.group would do.
int check_config(const Config& config) {
  const std::vector<std::string> faults = certificate_faults(config, unix_now());
  for (const std::string& fault : faults) fmt::print(stderr, "mkerneld: {}\n", fault);
  if (!faults.empty()) return kExitUsage;
  if (const auto group = admin_group(config); !group) {
    fmt::print(stderr, "mkerneld: {}\n", group.error().message);
    return kExitUsage;
  }
  const std::string doubt = name_doubt(config, unix_now());
  if (!doubt.empty()) fmt::print(stderr, "mkerneld: warning: {}\n", doubt);
  print_out(print_config(config));
  return 0;
}

int run_daemon(const Flags& flags, Config config) {
  Signals signals;
  std::optional<UniqueFd> socket;
  while (true) {
    LoggerOptions options;
    options.level = log_level_of(config.log.level);
    options.format = config.log.format;
    options.node = config.node_id;
    Logger logger(options);
    if (!socket) {
      prepare_process(logger);
      auto activated = take_activated_socket(config.socket.path);
      if (!activated) return fail_with(activated.error(), logger);
      socket = std::move(*activated);
    }
    route_grpc_log(&logger);
    auto ended = serve(flags, config, *socket, logger, signals);
    route_grpc_log(nullptr);
    if (const int* code = std::get_if<int>(&ended)) return *code;
    config = std::get<Config>(std::move(ended));
  }
}

int run(int argc, char** argv) {
  CLI::App app("mkerneld: the mkernel daemon of one node", "mkerneld");
  Flags flags;
  declare(app, flags);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return usage(error, app);
  }
  const auto config = load_config(flags.config, flags.overrides);
  if (!config) {
    fmt::print(stderr, "{}\n", config.error().message);
    return kExitUsage;
  }
  if (flags.check_config) return check_config(*config);
  if (flags.doctor) {
    const auto findings = doctor::examine(doctor::gather(*config, version_text(), find_nodes));
    print_out(flags.json ? doctor::to_json(findings) : doctor::to_text(findings));
    return doctor::exit_code(findings);
  }
  return run_daemon(flags, *config);
}

}  // namespace
}  // namespace mk::daemon

int main(int argc, char** argv) {
  return mk::finish_output("mkerneld", mk::daemon::run(argc, argv));
}
