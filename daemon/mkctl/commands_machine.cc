// About this machine, without a daemon: its GPUs and NICs, and what is wrong with it.
#include "daemon/mkctl/commands_machine.h"

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <optional>

#include "daemon/config/config.h"
#include "daemon/discovery/bystander.h"
#include "daemon/doctor/checks.h"
#include "daemon/doctor/probe.h"
#include "daemon/mkctl/daemon.h"
#include "daemon/mkctl/table.h"
#include "daemon/mkctl/targets.h"
#include "daemon/service/version.h"
#include "daemon/topology/draw.h"
#include "daemon/topology/rails.h"
#include "shm/files/standard_output.h"

namespace mk::mkctl {
namespace {

/// The configuration that a daemon of this machine would have.
Result<daemon::Config> configuration(const Commands& commands) {
  auto file = commands.given("--config");
  if (file.empty() && ::access(kSystemConfig, R_OK) == 0) file = kSystemConfig;
  return daemon::load_config(file, {});
}

int complain(const Error& error, int code) {
  fmt::print(stderr, "mkctl: {}\n", error.message);
  return code;
}

/// `json`: an object.
void print(const Commands& commands, const std::string& command, const std::string& text,
           const std::string& json) {
  if (!commands.given("--json").empty()) {
    print_out("{}\n", text_of(envelope(command, Json::parse(json)), 2));
  } else {
    print_out(text);
  }
}

/// The daemon that the flags or the configuration name, if it answers.
struct RunningDaemon {
  std::optional<daemon::Config> config;  ///< that in effect; none: it does not tell
  std::vector<topology::PlacedRank> ranks;
};

RunningDaemon ask_running(const Commands& commands) {
  TargetFlags flags{.address = commands.given("--address"),
                    .config = commands.given("--config"),
                    .timeout = "2s",
                    .host = {},
                    .hosts = {},
                    .tls_cert = commands.given("--tls-cert"),
                    .tls_key = commands.given("--tls-key"),
                    .tls_ca = commands.given("--tls-ca")};
  RunningDaemon found;
  auto targets = find_targets(flags);
  if (!targets) return found;
  Daemon running(std::move(targets->front()));
  v1::ListSessionsResponse list;
  if (!running.ask(&v1::Admin::Stub::ListSessions, v1::ListSessionsRequest(), list).ok())
    return found;
  for (const v1::Session& one : list.sessions()) {
    found.ranks.push_back({printable(one.job()), one.rank(), one.rail(), printable(one.gpu()),
                           printable(one.cpus()), printable(one.rail_why())});
  }
  v1::GetConfigResponse told;
  if (!running.ask(&v1::Admin::Stub::GetConfig, v1::GetConfigRequest(), told).ok()) return found;
  auto parsed = daemon::parse_config(told.toml(), "the daemon's configuration", {});
  if (parsed) found.config = std::move(*parsed);
  return found;
}

/// A file that is named is what the caller asks about; else what the running daemon goes by counts
/// for more than the file that it would read today.
int show_topology(const Commands& commands, const std::string& xml) {
  RunningDaemon running;
  if (xml.empty()) running = ask_running(commands);
  auto config = configuration(commands);
  if (commands.given("--config").empty() && running.config) config = std::move(*running.config);
  if (!config) return complain(config.error(), kExitUsage);
  const auto machine = xml.empty() ? topology::read_machine() : topology::read_machine(xml);
  if (!machine) return complain(machine.error(), kExitUnhealthy);
  const auto choices = topology::choose_nics(*machine, *config);
  const auto shown = choices.value_or(std::vector<topology::RailChoice>());
  print(commands, "topology", topology::draw(*machine, shown, running.ranks, config->gpu_rails),
        topology::to_json(*machine, shown, running.ranks, config->gpu_rails));
  return choices ? kExitOk : complain(choices.error(), kExitUnhealthy);
}

/// The node that the running daemon is, when one tells. A file that all nodes share (a pod's) does
/// not say that.
std::optional<std::uint32_t> running_node(const daemon::Config& config) {
  const std::string path = admin_socket_path(config);
  if (path.empty()) return std::nullopt;
  daemon::Address address;
  address.unix_socket = true;
  address.path = path;
  constexpr std::chrono::seconds kPatience(2);
  Daemon running({address.text(), address, {}, kPatience});
  v1::GetStatusResponse status;
  if (!running.ask(&v1::Admin::Stub::GetStatus, v1::GetStatusRequest(), status).ok())
    return std::nullopt;
  return status.node();
}

int show_doctor(const Commands& commands) {
  auto config = configuration(commands);
  if (!config) return complain(config.error(), kExitUsage);
  if (const auto node = running_node(*config)) config->node_id = *node;
  const auto findings =
      doctor::examine(doctor::gather(*config, daemon::version_text(), daemon::find_nodes));
  print(commands, "doctor", doctor::to_text(findings), doctor::to_json(findings));
  return doctor::exit_code(findings);
}

}  // namespace

void declare_machine_commands(Commands& commands) {
  const auto xml = std::make_shared<std::string>();
  // A caller that names another machine must not take the answer for that one's.
  const auto here = [&commands](const auto& run) {
    for (const char* flag : {"--host", "--hosts"}) {
      if (commands.given(flag).empty()) continue;
      const auto reason =
          fmt::format("this looks at the machine it runs on; leave {} away, or run it there", flag);
      return complain({ErrorCode::kInvalidArgument, reason}, kExitUsage);
    }
    return run();
  };
  commands
      .add_offline(
          "topology", "Draw this machine's GPUs and NICs, and which serves which rail and rank",
          [&commands, xml, here] { return here([&] { return show_topology(commands, *xml); }); })
      .option("--xml", *xml, "Another machine, as `lstopo FILE.xml` wrote it");
  commands.add_offline("doctor", "Check this machine, and say what to mend",
                       [&commands, here] { return here([&] { return show_doctor(commands); }); });
}

}  // namespace mk::mkctl
