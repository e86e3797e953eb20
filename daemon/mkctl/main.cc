// mkctl: asks mkerneld, prints the answer; drains it, ends jobs. Flags and exit codes; commands
// declare themselves in commands_*.cc.
#include <fmt/format.h>
#include <grpc/support/log.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>

#include "daemon/fabric/library_signals.h"
#include "daemon/mkctl/commands.h"
#include "daemon/mkctl/commands_machine.h"
#include "daemon/mkctl/targets.h"
#include "daemon/service/version.h"
#include "shm/files/standard_output.h"

namespace mk::mkctl {
namespace {

struct Flags {
  TargetFlags targets;
  bool json = false;
};

void declare_flags(CLI::App& app, Flags& flags) {
  TargetFlags& targets = flags.targets;
  app.fallthrough();  // flags may follow the command
  app.require_subcommand(1);
  app.footer(
      fmt::format("Examples:\n"
                  "  mkctl status\n"
                  "  mkctl --hosts node1,node2 who-is-slow\n"
                  "  mkctl --json job list\n\n"
                  "`mkctl COMMAND --help` has the flags and an example of each command.\n{}",
                  kExitStatuses));
  app.set_version_flag("--version", daemon::version_text());
  app.add_option("--address", targets.address,
                 "The daemon's address: HOST:PORT or unix:/PATH; default: the configuration's")
      ->envname("MKCTL_ADDRESS");
  app.add_option("--host", targets.host, "Another machine's daemon: HOST or HOST:PORT");
  app.add_option("--hosts", targets.hosts, "Several: HOST,HOST:PORT,... or @FILE, one per line");
  app.add_option(
         "--config", targets.config,
         fmt::format("The daemon's configuration; default: {} if it is there", kSystemConfig))
      ->envname("MKERNELD_CONFIG");
  app.add_flag("--json", flags.json, "Print JSON (of what goes on: one line per sample)");
  app.add_option("--timeout", targets.timeout, "How long to wait for an answer")
      ->capture_default_str();
  app.add_option("--tls-cert", targets.tls_cert, "Own certificate (PEM)");
  app.add_option("--tls-key", targets.tls_key, "Its key (PEM)");
  app.add_option("--tls-ca", targets.tls_ca, "The daemons' CA (PEM)");
}

void declare_commands(Commands& commands) {
  declare_list_commands(commands);
  declare_drain_commands(commands);
  declare_job_commands(commands);
  declare_job_set_command(commands);
  declare_link_commands(commands);
  declare_config_commands(commands);
  declare_stats_command(commands);
  declare_metrics_command(commands);
  declare_machine_commands(commands);
  declare_slow_command(commands);
  declare_trace_commands(commands);
  declare_bundle_command(commands);
  declare_top_command(commands);
  declare_offline_commands(commands);
}

int usage(const std::string& text) {
  fmt::print(stderr, "mkctl: {}\nTry `mkctl --help`.\n", text);
  return kExitUsage;
}

int run(int argc, char** argv) {
  CLI::App app("mkctl: asks mkernel daemons", "mkctl");
  Flags flags;
  declare_flags(app, flags);
  Commands commands(app);
  declare_commands(commands);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    const auto rest = app.remaining(true);
    const bool unknown = dynamic_cast<const CLI::RequiredError*>(&error) && !rest.empty();
    return usage(unknown ? fmt::format("unknown command \"{}\"", rest.front()) : error.what());
  }
  const Commands::Chosen& chosen = *commands.chosen();
  if (chosen.run_offline) return chosen.run_offline();
  auto targets = find_targets(flags.targets);
  if (!targets) {
    fmt::print(stderr, "mkctl: {}\n", targets.error().message);
    return kExitUsage;
  }
  Fleet fleet(std::move(*targets), chosen.name, flags.json);
  return chosen.run(fleet);
}

}  // namespace
}  // namespace mk::mkctl

int main(int argc, char** argv) {
  mk::daemon::take_signals_back();
  // mkctl says itself what went wrong, in words for users.
  if (std::getenv("GRPC_VERBOSITY") == nullptr) gpr_set_log_function([](gpr_log_func_args*) {});
  return mk::finish_output("mkctl", mk::mkctl::run(argc, argv));
}
