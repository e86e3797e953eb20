/// \file
/// mkbench's commands: `mkbench OPERATOR`, one per case; `mkbench all`; `mkbench scaling OPERATOR`;
/// `mkbench explain OPERATOR`; `mkbench plan`; `mkbench tune OPERATOR`; `mkbench calibrate`.
#pragma once

#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <vector>

#include "tests/bench/mkbench/operator_case.h"
#include "tests/bench/mkbench/run_flags.h"

namespace mk::bench {

/// One command of the command line.
class Command {
 public:
  virtual ~Command() = default;
  virtual bool chosen() const = 0;
  virtual void check() const = 0;
  virtual int run() = 0;  ///< the exit status
};

/// `mkbench all`: every operator in one run, and one table.
std::unique_ptr<Command> make_all_command(CLI::App& app, const std::string& line);
/// `mkbench scaling OPERATOR`: nodes 1 to N, a rank's work being the same.
std::unique_ptr<Command> make_scaling_command(CLI::App& app, const std::string& name,
                                              const std::string& line);

/// `mkbench explain OPERATOR`: the planner's choice and what else would cost (kernels/plan).
std::unique_ptr<Command> make_explain_command(CLI::App& app);

/// `mkbench plan`: what a launch on a larger cluster takes and needs.
std::unique_ptr<Command> make_plan_command(CLI::App& app, const std::string& line);

/// `mkbench tune OPERATOR SHAPE...`: measures around the planner's choice, and writes tuned.json.
std::unique_ptr<Command> make_tune_command(CLI::App& app);

/// `mkbench calibrate`: measures this machine, and writes a machine file.
std::unique_ptr<Command> make_calibrate_command(CLI::App& app);

class Commands {
 public:
  /// Adds all commands to `app`. `line` is the command line, for reports.
  Commands(CLI::App& app, const std::string& line);
  /// Of the chosen command, once `app` has parsed.
  void check() const;
  int run();

 private:
  std::vector<std::unique_ptr<Command>> commands_;
};

}  // namespace mk::bench
