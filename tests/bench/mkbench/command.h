/// \file
/// mkbench's commands: `mkbench OPERATOR`, one per case.
#pragma once

#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <vector>

#include "tests/bench/mkbench/bench.h"
#include "tests/bench/mkbench/operator_case.h"

namespace mk::bench {

/// How to run, whatever is run: world, fabric, launches, checks.
class RunFlags {
 public:
  explicit RunFlags(CLI::App& command);
  /// Throws CLI::ValidationError for flags that exclude each other.
  void check() const;

  BenchOptions options;
  std::string json_path, trace_path, picture_path;

 private:
  CLI::App& command_;
};

/// One command of the command line.
class Command {
 public:
  virtual ~Command() = default;
  virtual bool chosen() const = 0;
  virtual void check() const = 0;
  virtual int run() = 0;  ///< the exit status
};

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
