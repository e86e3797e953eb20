/// \file
/// From the ranks' reports to figures. A launch takes as long as its slowest rank.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "kernels/plan/candidate.h"
#include "kernels/plan/machine.h"
#include "tests/bench/mkbench/spec.h"
#include "tests/bench/mkbench/statistics.h"

namespace mk::bench {

/// Reports by launch and rank.
using Reports = std::vector<std::vector<LaunchReport>>;

/// One mode's timed launches.
struct ModeFigures {
  Summary total_ms, compute_ms;
  double core_ms = 0;  ///< RankCase::core_ns, the shortest; 0: not known
  std::vector<double> samples_ms;
  std::uint64_t network_bytes_per_rank = 0;
  std::uint64_t commands_per_rank = 0;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ModeFigures, total_ms, compute_ms, core_ms, samples_ms,
                                   network_bytes_per_rank, commands_per_rank)

ModeFigures figures_of(const Reports& reports, bool fused);

struct Verification {
  bool asked = true;
  std::uint64_t launches = 0, launches_checked = 0, elements_compared = 0, wrong = 0;
  std::uint64_t launches_with_differing_ranks = 0;  ///< where all ranks' outputs must be equal
  double worst_ratio = 0, max_error = 0;
  bool passed() const {
    return wrong == 0 && launches_with_differing_ranks == 0 &&
           (!asked || (launches_checked > 0 && elements_compared > 0));
  }
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Verification, launches, launches_checked, elements_compared,
                                   wrong, launches_with_differing_ranks, worst_ratio, max_error)

/// `asked`: whether any launch should be checked. If so, and no launch was by all its ranks, the
/// verification has not passed.
Verification verification_of(const Reports& reports, bool outputs_are_equal, bool asked);

/// The most that any rank has to do in any launch, and all ranks of a launch together.
struct WorkFigures {
  Work per_rank, all_ranks;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(WorkFigures, per_rank, all_ranks)

WorkFigures work_of(const Reports& reports);

/// Over how many links a rank's bytes leave at once; less than one where ranks share a rail's.
double links_at_once(const WorkFigures& work, const BenchSpec& spec, std::uint32_t rails);
/// Bytes that a launch put on the busiest link, headers included. Ranks of a node share a rail's
/// links when there are fewer rails than ranks.
double link_bytes(const ModeFigures& figures, const WorkFigures& work, const BenchSpec& spec,
                  std::uint32_t rails);

/// What LaunchMode::kAuto goes by: the ranks' longest estimates of the last launch.
struct Estimates {
  double fused_ms = 0, unfused_ms = 0;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Estimates, fused_ms, unfused_ms)

Estimates estimates_of(const Reports& reports);
/// Why kAuto's choice means little in this run, as a clause; empty where the estimates are within a
/// factor of three of what was measured.
std::string doubt_of(const Estimates& estimates, const ModeFigures& fused,
                     const ModeFigures& unfused);

/// What `mkctl --json link list` counted since an earlier look at the same daemon: of each link,
/// the counters' differences. A link that was not there before counts from nothing.
nlohmann::json links_since(const nlohmann::json& before, nlohmann::json after);

/// What no execution on this machine and these links can beat, as the planner has it
/// (plan/bound.h): each leg as if alone. All ranks of a run on CPUs share the machine's cores and
/// memory.
struct Bound {
  double compute_ms = 0;   ///< the ranks' computation, measured: all at once, no communication
                           ///< (the unfused form's; or the core's alone, where it is quicker)
  double network_ms = 0;   ///< the busiest link's bytes at the rate it is paced to
  double local_ms = 0;     ///< a CPU's copies and sums, or a GPU's bytes over NVLink
  double ms = 0;           ///< the largest
  std::string limit;       ///< which that is
  double fused_share = 0;  ///< `ms` / the fused median
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Bound, compute_ms, network_ms, local_ms, ms, limit, fused_share)

struct RunRates {
  double link_bytes_per_s = 0;   ///< 0: not paced
  double local_bytes_per_s = 0;  ///< one rank's, read and written; 0: the machine's
};

/// None without launches of both modes of one size, or with several nodes whose links have no known
/// rate. `problems`: what a launch asks of the planner, of `machine`.
std::optional<Bound> bound_of(const BenchSpec& spec, std::uint32_t rails,
                              const std::vector<kernels::plan::Problem>& problems,
                              const kernels::plan::Machine& machine, const WorkFigures& work,
                              const ModeFigures& fused, const ModeFigures& unfused,
                              const RunRates& rates);

}  // namespace mk::bench
