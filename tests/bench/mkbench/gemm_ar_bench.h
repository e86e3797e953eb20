/// \file
/// `mkbench gemm-ar`: fused against unfused GEMM+AllReduce over real daemons and rank processes of
/// this machine.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "shm/host/result.h"
#include "tests/bench/mkbench/gemm_ar_spec.h"
#include "tests/bench/mkbench/statistics.h"

namespace mk::bench {

struct GemmArBenchOptions {
  GemmArSpec spec;
  std::string fabric = "loopback";
  std::uint32_t rails = 1;
  /// loopback: "2GB/s"; empty: unpaced; "balanced": so that one link needs as long for its bytes as
  /// a rank for its GEMM.
  std::string link_bandwidth;
  std::string link_latency;
  /// Running daemons to join, one client socket per node, and their Admin addresses (may be empty:
  /// no link figures).
  std::vector<std::string> join_sockets, join_admin;
};

/// One mode's launches: the slowest rank of each.
struct ModeFigures {
  Summary total_ms, compute_ms;
  std::vector<double> samples_ms;
  std::uint64_t network_bytes_per_rank = 0;
  std::uint64_t commands_per_rank = 0;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ModeFigures, total_ms, compute_ms, samples_ms,
                                   network_bytes_per_rank, commands_per_rank)

struct Verification {
  std::uint64_t launches = 0, launches_checked = 0, elements_compared = 0, wrong = 0;
  std::uint64_t launches_with_differing_ranks = 0;
  double worst_ratio = 0, max_error = 0;
  bool passed() const {
    return wrong == 0 && launches_with_differing_ranks == 0 &&
           (launches_checked == 0 || elements_compared > 0);
  }
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Verification, launches, launches_checked, elements_compared,
                                   wrong, launches_with_differing_ranks, worst_ratio, max_error)

struct GemmArBenchResult {
  std::string fabric;
  std::string link_bandwidth;  ///< as the daemons were told; empty: unpaced
  ModeFigures fused, unfused;
  double speedup = 0;  ///< median unfused over median fused; 0 unless both ran
  Verification verification;
  nlohmann::json links;  ///< by node, as `mkctl link list --json` gave them at the end
};

/// Runs it. `progress` gets short lines for people. An error names the daemon or rank that failed
/// and why; what was started is stopped in every case.
Result<GemmArBenchResult> run_gemm_ar_bench(
    const GemmArBenchOptions& options, const std::function<void(const std::string&)>& progress);

}  // namespace mk::bench
