/// \file
/// The files that mkbench writes: drafts from the beginning, so that one that cannot be written is
/// known before anything is measured; in place at the end.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "shm/files/output_file.h"
#include "tests/bench/mkbench/run_flags.h"

namespace mk::bench {

class ReportFiles {
 public:
  /// Those that the flags name.
  static Result<ReportFiles> open(const RunFlags& flags);

  // Each writes its file, if there is to be one. `report` and `trace` are objects.
  Status write_json(nlohmann::json report);
  Status write_trace(nlohmann::json trace);
  Status write_picture(const std::string& picture);

 private:
  std::optional<OutputFile> json_, trace_, picture_;
};

}  // namespace mk::bench
