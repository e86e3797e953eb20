/// \file
/// What one seed stands for: the cluster, its network, its jobs, and what goes wrong when.
#pragma once

#include <cstdint>
#include <vector>

#include "tests/sim/network.h"
#include "tests/sim/node.h"
#include "tests/sim/rank.h"

namespace mk::sim {

/// One thing that goes wrong.
struct Fault {
  enum class Kind {
    kBreakLinks,  ///< all links between `node` and `other`
    kFlapPort,    ///< a rail of `node`
    kCutWire,     ///< the daemons' stream between `node` and `other`
    kRestart,     ///< the daemon of `node` dies and comes back
    kFreeze,      ///< nothing of `node` runs for a while
    kJumpClock,   ///< of `node`
    kStorm,       ///< `node`'s endpoints take next to nothing
    kDrain,       ///< `node` takes no new ranks for a while
  };
  static constexpr int kKinds = 8;
  Kind kind = Kind::kBreakLinks;
  std::uint64_t at_ns = 0;  ///< after the start
  NodeId node = 0, other = 0;
  std::uint32_t rail = 0;
  std::uint64_t for_ns = 0;
};
const char* fault_name(Fault::Kind kind);

/// One job: what its ranks agree on, and how those of each of its runs behave.
struct JobSchedule {
  JobPlan plan;
  std::uint64_t start_ns = 0;
  /// By run; in each at most one rank, so that the others' errors have one cause.
  struct Run {
    std::uint32_t rank = 0;
    RankPlan behaviour;
  };
  std::vector<Run> runs;
};

struct ClusterPlan {
  std::uint32_t nodes = 2, rails = 1;
  NetworkPlan network;
  NodePlan node;  ///< but for its id
  std::uint64_t wire_delay_ns_max = kMillisecond;
  std::vector<JobSchedule> jobs;
  std::vector<Fault> faults;
};

/// What may be asked of a plan instead of leaving it to the seed.
struct PlanOptions {
  std::uint32_t nodes = 0;  ///< 0: 2 to 16, small ones more often
};

/// The plan of a seed, drawn from `random`.
ClusterPlan draw_plan(Random& random, const PlanOptions& options);

}  // namespace mk::sim
