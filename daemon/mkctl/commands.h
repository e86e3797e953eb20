/// \file
/// mkctl's commands: each file of them declares its own, flags and all.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>

#include "daemon/mkctl/fleet.h"

namespace mk::mkctl {

/// Where commands are declared. What their flags are stored in, they share with their run function.
class Commands {
 public:
  using Run = std::function<int(Fleet&)>;

  explicit Commands(CLI::App& app) : app_(app) {}

  /// Adds "status" or "link show"; `run` is called when it was given. The returned App takes its
  /// flags.
  CLI::App& add(const std::string& name, const std::string& summary, Run run);
  /// The same, for a command that needs no daemon.
  CLI::App& add_offline(const std::string& name, const std::string& summary,
                        std::function<int()> run);

  struct Chosen {
    std::string name;
    Run run;
    std::function<int()> run_offline;  ///< when this one is set
  };
  /// After parsing; nothing when none was given.
  const Chosen* chosen() const;
  const std::vector<Chosen>& all() const { return commands_; }
  CLI::App& app() const { return app_; }

 private:
  CLI::App& place(const std::string& name, const std::string& summary);

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

/// A duration such as "5s", checked while flags are parsed.
struct Duration {
  std::string text;
  std::chrono::nanoseconds value() const;
  static CLI::Validator valid();
};

}  // namespace mk::mkctl
