/// \file
/// mkctl's commands: each file of them declares its own, flags and all.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/mkctl/fleet.h"

// CLI11 is compiled in commands.cc, completion.cc and main.cc only: it is large, and all in its
// header.
namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace mk::mkctl {

/// The end of every help text.
inline constexpr std::string_view kExitStatuses =
    "Exit status: 0 ok, 1 the daemon is not well or refused, 2 usage, 3 nobody answered.\n"
    "See mkctl(1).";

/// A duration such as "5s", checked while flags are parsed.
struct Duration {
  std::string text;
  std::chrono::nanoseconds value() const;
};

/// One flag or argument, just declared: what else is to hold of it.
class Flag {
 public:
  explicit Flag(CLI::Option& option) : option_(option) {}

  Flag& required();
  Flag& with_default();  ///< the help shows the value that it has now
  Flag& not_negative();
  Flag& between(int least, int most);
  Flag& between(double least, double most);
  Flag& one_of(const std::vector<std::string>& words);

 private:
  CLI::Option& option_;
};

/// A command, just declared, takes its flags ("-o,--output") and arguments ("FILE"). What they are
/// stored in must live as long as the command's run function, which shares it.
class Command {
 public:
  explicit Command(CLI::App& app) : app_(app) {}

  Flag option(const std::string& name, std::string& value, const std::string& help);
  Flag option(const std::string& name, double& value, const std::string& help);
  Flag option(const std::string& name, std::int64_t& value, const std::string& help);
  Flag option(const std::string& name, std::uint32_t& value, const std::string& help);
  Flag option(const std::string& name, Duration& value, const std::string& help);
  Flag flag(const std::string& name, bool& value, const std::string& help);

 private:
  CLI::App& app_;
};

/// Where commands are declared.
class Commands {
 public:
  using Run = std::function<int(Fleet&)>;

  explicit Commands(CLI::App& app) : app_(app) {}

  /// Adds "status" or "link show"; `run` is called when it was given.
  Command add(const std::string& name, const std::string& summary, Run run);
  /// The same, for a command that needs no daemon.
  Command add_offline(const std::string& name, const std::string& summary,
                      std::function<int()> run);

  struct Chosen {
    std::string name;
    Run run;
    std::function<int()> run_offline;  ///< when this one is set
  };
  /// After parsing; nothing when none was given.
  const Chosen* chosen() const;
  const std::vector<Chosen>& all() const { return commands_; }
  const CLI::App& app() const { return app_; }
  /// What mkctl's own flag, such as "--config", was given as, after parsing; empty when it was not.
  std::string given(const std::string& flag) const;

 private:
  Command place(const std::string& name, const std::string& summary);

  CLI::App& app_;
  std::vector<Chosen> commands_;
  std::vector<CLI::App*> apps_;  ///< of `commands_`
};

void declare_list_commands(Commands& commands);     ///< status, version, session|queue|link list
void declare_drain_commands(Commands& commands);    ///< drain, resume, ready
void declare_stats_command(Commands& commands);     ///< stats
void declare_job_commands(Commands& commands);      ///< job list|show|terminate
void declare_job_set_command(Commands& commands);   ///< job set
void declare_link_commands(Commands& commands);     ///< link show
void declare_config_commands(Commands& commands);   ///< config show|diff
void declare_metrics_command(Commands& commands);   ///< metrics
void declare_slow_command(Commands& commands);      ///< who-is-slow
void declare_trace_commands(Commands& commands);    ///< trace record
void declare_bundle_command(Commands& commands);    ///< bundle
void declare_top_command(Commands& commands);       ///< top
void declare_offline_commands(Commands& commands);  ///< completion, schema

}  // namespace mk::mkctl
