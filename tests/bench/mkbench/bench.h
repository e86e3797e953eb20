/// \file
/// One measurement: fused against unfused launches of an operator over real daemons and rank
/// processes of this machine, every element checked.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "shm/host/result.h"
#include "tests/bench/mkbench/figures.h"
#include "tests/bench/mkbench/spec.h"
#include "tests/bench/mkbench/trace.h"

namespace mk::bench {

struct BenchOptions {
  BenchSpec spec;
  std::string fabric = "loopback";
  std::uint32_t rails = 1;
  /// loopback: "2GB/s"; empty: unpaced; kBalanced: so that the busiest link needs as long for its
  /// bytes as the ranks for their computation.
  std::string link_bandwidth;
  std::string link_latency;
  /// Running daemons to join, one client socket per node, and their Admin addresses (may be empty:
  /// no link figures).
  std::vector<std::string> join_sockets, join_admin;
  std::string daemon_program, rank_program;  ///< empty: found beside this program; this program
};
inline constexpr const char* kBalanced = "balanced";

struct BenchResult {
  std::string fabric;
  std::string link_bandwidth;  ///< as the daemons were told; empty: unpaced
  ModeFigures fused, unfused;
  double speedup = 0;  ///< median unfused over median fused; 0 unless both ran
  WorkFigures work;
  Estimates estimates;
  std::optional<Bound> bound;
  Verification verification;
  nlohmann::json links;             ///< by node, as `mkctl link list --json` gave them at the end
  Reports reports;                  ///< all of them, by launch and rank
  std::vector<LaunchTrace> traces;  ///< of each mode's traced launches the median one
};

using Progress = std::function<void(const std::string&)>;

/// Runs it. `progress` gets short lines for users. An error names the daemon or rank that failed
/// and why; what was started is stopped in every case.
Result<BenchResult> run_bench(const BenchOptions& options, const Progress& progress);

}  // namespace mk::bench
