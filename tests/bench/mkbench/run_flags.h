/// \file
/// The flags and the manners that mkbench's commands share.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "tests/bench/mkbench/bench.h"

namespace mk::bench {

/// How to run, whatever is run: world, fabric, launches, checks.
class RunFlags {
 public:
  explicit RunFlags(CLI::App& command);
  void add_trace_flags();
  /// Throws CLI::ValidationError for flags that exclude each other.
  void check() const;

  BenchOptions options;
  std::string json_path, trace_path, picture_path;
  bool overwrite = false;  ///< those may be any files

 private:
  CLI::App& command_;
};

/// On a terminal one line that changes; elsewhere nothing, so that logs stay short.
void show_progress(const std::string& text);
/// Prints it; answers `code`, the exit status.
int report_error(const Error& error, int code = 1);

}  // namespace mk::bench
