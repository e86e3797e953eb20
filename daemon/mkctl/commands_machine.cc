// About this machine, without a daemon: its GPUs and NICs, and what is wrong with it.
#include "daemon/mkctl/commands_machine.h"

#include <fmt/format.h>
#include <unistd.h>

#include <memory>

#include "daemon/config/config.h"
#include "daemon/doctor/checks.h"
#include "daemon/doctor/probe.h"
#include "daemon/service/version.h"
#include "daemon/topology/draw.h"
#include "daemon/topology/rails.h"

namespace mk::mkctl {
namespace {

constexpr int kOk = 0;
constexpr int kUnhealthy = 1;
constexpr int kUsage = 2;
constexpr const char* kConfiguration = "/etc/mkernel/mkerneld.toml";

/// The configuration that a daemon of this machine would have.
Result<daemon::Config> configuration(const CLI::App& app) {
  auto file = app.get_option("--config")->as<std::string>();
  if (file.empty() && ::access(kConfiguration, R_OK) == 0) file = kConfiguration;
  return daemon::load_config(file, {});
}

int complain(const Error& error, int code) {
  fmt::print(stderr, "mkctl: {}\n", error.message);
  return code;
}

int show_topology(const CLI::App& app, const std::string& xml) {
  const auto config = configuration(app);
  if (!config) return complain(config.error(), kUsage);
  const auto machine = xml.empty() ? topology::read_machine() : topology::read_machine(xml);
  if (!machine) return complain(machine.error(), kUnhealthy);
  const auto choices = topology::choose_nics(*machine, *config);
  const auto shown = choices.value_or(std::vector<topology::RailChoice>());
  if (app.get_option("--json")->as<bool>()) {
    fmt::print("{}\n", topology::to_json(*machine, shown));
  } else {
    fmt::print("{}", topology::draw(*machine, shown));
  }
  return choices ? kOk : complain(choices.error(), kUnhealthy);
}

int show_doctor(const CLI::App& app) {
  const auto config = configuration(app);
  if (!config) return complain(config.error(), kUsage);
  const auto findings = doctor::examine(doctor::gather(*config, daemon::version_text()));
  fmt::print("{}", app.get_option("--json")->as<bool>() ? doctor::to_json(findings)
                                                        : doctor::to_text(findings));
  return doctor::exit_code(findings);
}

}  // namespace

void declare_machine_commands(Commands& commands) {
  const auto xml = std::make_shared<std::string>();
  CLI::App& app = commands.app();
  commands
      .add_offline("topology", "Draw this machine's GPUs and NICs, and which serves which rail",
                   [&app, xml] { return show_topology(app, *xml); })
      .add_option("--xml", *xml, "Another machine, as `lstopo FILE.xml` wrote it");
  commands.add_offline("doctor", "Check this machine, and say what to mend",
                       [&app] { return show_doctor(app); });
}

}  // namespace mk::mkctl
