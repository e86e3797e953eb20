// The configuration that a daemon runs with, and how a file differs from it.
#include <fmt/format.h>

#include "daemon/config/compare.h"
#include "daemon/config/secrets.h"
#include "daemon/mkctl/commands.h"
#include "daemon/mkctl/render.h"
#include "daemon/mkctl/table.h"

namespace mk::mkctl {
namespace {

using Stub = v1::Admin::Stub;

Answer show(Daemon& daemon) {
  v1::GetConfigResponse response;
  const auto done = daemon.ask(&Stub::GetConfig, v1::GetConfigRequest(), response);
  if (!done.ok()) return daemon.explain(done);
  return answer_of(response,
                   fmt::format("# in effect at {}; {}\n{}", printable(daemon.name()),
                               response.file().empty() ? "from flags and defaults"
                                                       : "from " + printable(response.file()),
                               response.toml()));
}

std::string render(const v1::GetConfigResponse& difference, const std::string& file) {
  if (difference.changes_size() == 0) return fmt::format("{} is in effect\n", printable(file));
  std::string text;
  for (const v1::ConfigChange& change : difference.changes()) {
    const auto shown = [](const std::string& value) {
      return value.empty() ? std::string("(none)") : printable(value);
    };
    text += fmt::format("{}: {} -> {}  ({})\n", printable(change.key()), shown(change.before()),
                        shown(change.after()), change.live() ? "reload" : "restart");
  }
  return text;
}

/// Against a file of this machine. Secrets are not compared: the daemon does not tell its own.
Status compare_with(const std::string& file, v1::GetConfigResponse& response) {
  MK_ASSIGN_OR_RETURN(const auto theirs,
                      daemon::parse_config(response.toml(), "the daemon's configuration", {}));
  MK_ASSIGN_OR_RETURN(const auto ours, daemon::load_config(file, {}));
  for (const daemon::ConfigChange& change : daemon::compare_configs(theirs, ours)) {
    if (change.before.find(daemon::kSecretText) != std::string::npos) continue;
    v1::ConfigChange& one = *response.add_changes();
    one.set_key(change.key);
    one.set_before(change.before);
    one.set_after(change.after);
    one.set_live(change.live);
  }
  return {};
}

/// Exit status 1 when something differs, as diff does.
Answer diff(Daemon& daemon, const std::string& file) {
  v1::GetConfigRequest request;
  request.set_compare(file.empty());
  v1::GetConfigResponse response;
  const auto done = daemon.ask(&Stub::GetConfig, request, response);
  if (!done.ok()) return daemon.explain(done);
  if (!file.empty()) {
    response.clear_changes();
    if (const auto compared = compare_with(file, response); !compared) {
      return error_answer(kExitUsage, compared.error().message);
    }
  } else if (response.file().empty()) {
    return error_answer(
        kExitUnhealthy,
        fmt::format("{} has no configuration file; give one: mkctl config diff FILE",
                    daemon.name()));
  } else if (!response.file_error().empty()) {
    return error_answer(kExitUnhealthy, fmt::format("{} could not take {}: {}", daemon.name(),
                                                    response.file(), response.file_error()));
  }
  response.clear_toml();
  if (!file.empty()) response.set_file(file);
  return answer_of(response, render(response, response.file()),
                   response.changes_size() == 0 ? kExitOk : kExitUnhealthy);
}

}  // namespace

void declare_config_commands(Commands& commands) {
  commands.add("config show", "The configuration in effect, without secrets",
               [](Fleet& fleet) { return fleet.each(show); });
  const auto file = std::make_shared<std::string>();
  commands
      .add("config diff", "Show what the daemon's file, or another, would change",
           [file](Fleet& fleet) {
             return fleet.each([&](Daemon& daemon) { return diff(daemon, *file); });
           })
      .option("FILE", *file, "A file of this machine; default: the daemon's own, read again");
}

}  // namespace mk::mkctl
