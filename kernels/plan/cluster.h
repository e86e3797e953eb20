/// \file
/// A launch on a cluster that need not be there: its predicted time over any number of nodes, and
/// what each node needs for it. Host only.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/plan/candidate.h"
#include "kernels/plan/choose.h"
#include "kernels/plan/machine.h"
#include "kernels/plan/timeline.h"
#include "shm/host/result.h"

namespace mk::kernels::plan {

/// predict() (model.h) with what it was not fitted to:
///  - AllGather+GEMM's ring: each hop of a shard takes a chunk's time and the latency at least, so
///  small shards wait for each other: (N - 2) * max(0, chunk + latency - shard);
///  - an exchange: the last chunk goes to N - 1 nodes one after the other, when the product is
///  done;
///  - a two-shot exchange: its last round is added up when the last sums have come, and only then
///  goes to the others, a second latency later;
///  - of the other operators, the order in which things come (order.h): `wait`, in which a saving
///  is negative.
/// Equal to predict() for products on one or two nodes. All are held to launches in virtual time
/// (tests/sim/operators/plan_test.cc).
Timeline predict_on_cluster(const Problem& problem, const Machine& machine,
                            const Candidate& candidate);

/// The longest of what a launch is made of.
enum class Limit : std::uint8_t { kCompute, kLocal, kNetwork, kLatency };

/// One launch of one problem, as it would be on a cluster.
struct ClusterPlan {
  Choice choice;        ///< of the planner; its time is predict()'s
  Timeline time;        ///< predict_on_cluster
  double bound_us = 0;  ///< the longest leg by itself (bound.h)
  Limit limit = Limit::kCompute;
  std::uint64_t network_bytes = 0;     ///< sent by a rank
  std::uint64_t bytes_per_link = 0;    ///< on the busiest link from one node to another
  std::uint64_t commands = 0;          ///< of a rank
  std::uint64_t queue_pairs = 0;       ///< of a node, verbs, one queue a link
  std::uint64_t workspace_bytes = 0;   ///< of a rank
  std::uint64_t registered_bytes = 0;  ///< of a node: its ranks' workspaces
  std::uint32_t arrival_flags = 0;     ///< of a rank's session
  std::string advice;                  ///< what would help, in words
  std::vector<std::string> obstacles;  ///< why it cannot run today; empty: it can
};

/// Fused. Errors: those of choose().
Result<ClusterPlan> plan_cluster(const Problem& problem, const Machine& machine);

}  // namespace mk::kernels::plan
