/// \file
/// The rank processes of one job: a program, normally this one again, started once per rank, each
/// with a report pipe.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "client/tools/launch/process.h"
#include "shm/host/result.h"

namespace mk::tools {

class RankSet {
 public:
  /// Starts `world` copies of `program` (empty: of this program) with the arguments that
  /// `arguments_of(rank)` gives, and with the descriptors `inherited`. Their output goes to files
  /// in a private folder and shows up in errors.
  static Result<RankSet> start(
      std::uint32_t world, const std::string& program,
      const std::function<std::vector<std::string>(std::uint32_t)>& arguments_of,
      const std::vector<int>& inherited = {});

  /// The next report line of every rank, by rank. When one ends instead or is late: an error with
  /// what every failed rank said last (the one that failed first tells the cause, the others only
  /// that somebody is gone).
  Result<std::vector<std::string>> read_lines(std::chrono::milliseconds patience,
                                              const std::string& what);

  /// Waits for all of them to end well.
  Status finish(std::chrono::milliseconds patience);

  const std::string& folder() const { return folder_.path(); }

 private:
  explicit RankSet(TemporaryFolder folder) : folder_(std::move(folder)) {}
  Error explain(const std::string& what);

  TemporaryFolder folder_;
  std::vector<Process> ranks_;
};

/// A name that no other run of this machine uses: "mkbench-1f3a...".
std::string unique_job_name(const std::string& prefix);

}  // namespace mk::tools
