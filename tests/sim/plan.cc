#include "tests/sim/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <numeric>

#include "shm/layout.h"

namespace mk::sim {

namespace {

/// Faults come while jobs run; most jobs are over after some milliseconds.
constexpr std::uint64_t kFaultNsMin = 100 * kMicrosecond;
constexpr std::uint64_t kFaultNsMax = 2 * kSecond;
/// A pause that no deadline of ours may take for a death.
constexpr std::uint64_t kPauseNsMax = 3 * kSecond;
constexpr std::uint64_t kJumpNsMax = 60 * kSecond;

std::uint32_t draw_nodes(Random& random) {
  const std::uint64_t size = random.below(100);
  if (size < 45) return 2;
  if (size < 80) return static_cast<std::uint32_t>(random.between(3, 4));
  if (size < 96) return static_cast<std::uint32_t>(random.between(5, 8));
  return static_cast<std::uint32_t>(random.between(9, 16));
}

NetworkPlan draw_network(Random& random) {
  NetworkPlan plan;
  plan.contract = random.chance(500'000) ? fabric::DeliveryContract::kOrdered
                                         : fabric::DeliveryContract::kUnordered;
  plan.link_depth = static_cast<std::uint32_t>(random.scaled(1, 256));
  plan.delay_ns_min = random.scaled(200, 5'000);
  plan.delay_ns_max = plan.delay_ns_min + random.scaled(kMicrosecond, 20 * kMillisecond);
  const auto sometimes = [&](std::uint32_t per_million_max) {
    return random.chance(500'000) ? 0 : static_cast<std::uint32_t>(random.below(per_million_max));
  };
  plan.short_posts = sometimes(300'000);
  plan.duplicates = sometimes(200'000);
  plan.late_arrivals = sometimes(300'000);
  plan.lost = random.chance(100'000) ? static_cast<std::uint32_t>(random.below(20'000)) : 0;
  return plan;
}

JobPlan draw_job(Random& random, std::uint32_t number, std::uint32_t nodes) {
  JobPlan plan;
  plan.name = fmt::format("job{}", number);
  plan.uid = 1000 + number;
  std::vector<NodeId> all(nodes);
  std::iota(all.begin(), all.end(), 0);
  const std::uint64_t taken = random.chance(600'000) ? nodes : random.between(2, nodes);
  for (std::uint64_t i = 0; i < taken; ++i) {
    const std::size_t at = random.below(all.size());
    plan.nodes.push_back(all[at]);
    all.erase(all.begin() + static_cast<std::ptrdiff_t>(at));
  }
  plan.local_size = nodes > 8 ? 1 : static_cast<std::uint32_t>(random.scaled(1, 4));
  plan.lanes = static_cast<std::uint32_t>(random.scaled(1, 8));
  plan.slot_count_log2 = static_cast<std::uint32_t>(random.between(4, 6));
  plan.banks = static_cast<std::uint32_t>(random.between(2, 3));
  plan.chunks = static_cast<std::uint32_t>(random.scaled(1, 8));
  plan.chunk_bytes = 8 * static_cast<std::uint32_t>(random.scaled(1, 128));
  plan.flag_count = static_cast<std::uint32_t>(shm::round_up(plan.flag_words() + 1, 64));
  plan.stages = static_cast<std::uint32_t>(random.scaled(1, 2 * plan.peers() * plan.chunks));
  plan.launches = static_cast<std::uint32_t>(random.scaled(1, 32));
  // Now and then long enough for the low bits of an immediate's epoch to come round.
  if (nodes == 2 && random.chance(10'000)) {
    plan.launches = 1'100;
    plan.chunks = 1;
  }
  plan.think_ns_max = random.scaled(kMicrosecond, 2 * kMillisecond);
  plan.farewell = random.chance(500'000);
  return plan;
}

RankPlan draw_behaviour(Random& random, const JobPlan& job) {
  RankPlan plan;
  if (random.chance(650'000)) return plan;
  const std::uint64_t kind = random.below(10);
  plan.manner = kind < 4   ? Manner::kDies
                : kind < 6 ? Manner::kWritesGarbage
                : kind < 8 ? Manner::kTakesBufferBack
                : kind < 9 ? Manner::kLeaves
                           : Manner::kGoesOn;
  // Half of them in the protocol, half in the launches.
  const std::uint32_t launched = 14 + job.launches * (1 + job.peers() * job.chunks);
  plan.at_action = static_cast<std::uint32_t>(
      random.chance(500'000) ? random.between(1, 14) : random.between(14, launched));
  return plan;
}

Fault draw_fault(Random& random, const ClusterPlan& cluster) {
  Fault fault;
  fault.kind = static_cast<Fault::Kind>(random.below(Fault::kKinds));
  fault.at_ns = random.scaled(kFaultNsMin, kFaultNsMax);
  fault.node = static_cast<NodeId>(random.below(cluster.nodes));
  fault.other =
      static_cast<NodeId>((fault.node + random.between(1, cluster.nodes - 1)) % cluster.nodes);
  fault.rail = static_cast<std::uint32_t>(random.below(cluster.rails));
  fault.for_ns = random.scaled(kMillisecond, kPauseNsMax);
  if (fault.kind == Fault::Kind::kJumpClock) fault.for_ns = random.scaled(kMillisecond, kJumpNsMax);
  return fault;
}

}  // namespace

const char* fault_name(Fault::Kind kind) {
  static constexpr const char* kNames[] = {"links break", "port flap",  "cut stream",   "restart",
                                           "freeze",      "clock jump", "EAGAIN storm", "drain"};
  return kNames[static_cast<int>(kind)];
}

ClusterPlan draw_plan(Random& random, const PlanOptions& options) {
  ClusterPlan plan;
  plan.nodes = options.nodes != 0 ? options.nodes : draw_nodes(random);
  plan.rails = static_cast<std::uint32_t>(random.between(1, 2));
  plan.network = draw_network(random);
  plan.wire_delay_ns_max = random.scaled(20 * kMicrosecond, 100 * kMillisecond);
  plan.node.nodes = plan.nodes;
  plan.node.rails = plan.rails;
  plan.node.outstanding_max = static_cast<std::uint32_t>(random.scaled(2, 256));
  plan.node.heartbeat_interval_ns = random.scaled(50 * kMillisecond, 400 * kMillisecond);
  plan.node.batch_window_ns = random.below(4) * kMicrosecond;
  plan.node.delay_ns_max = random.scaled(kMicrosecond, 5 * kMillisecond);

  const std::uint32_t jobs = plan.nodes > 8 ? 1 : static_cast<std::uint32_t>(random.between(1, 3));
  std::uint32_t most_sessions = 0;
  for (std::uint32_t i = 0; i < jobs; ++i) {
    JobSchedule job;
    job.plan = draw_job(random, i, plan.nodes);
    most_sessions += job.plan.local_size;
    job.start_ns = random.scaled(kMicrosecond, 100 * kMillisecond);
    const std::uint64_t runs = random.between(1, 3);
    for (std::uint64_t run = 0; run < runs; ++run) {
      job.runs.push_back({static_cast<std::uint32_t>(random.below(job.plan.world())),
                          draw_behaviour(random, job.plan)});
    }
    plan.jobs.push_back(std::move(job));
  }
  // Often so few that slots come back at once; a run that comes before they do is turned away.
  plan.node.sessions_max = random.chance(500'000) ? 64 : std::min(64u, 2 * most_sessions);
  const std::uint64_t faults = random.chance(350'000) ? 0 : random.scaled(1, 6);
  for (std::uint64_t i = 0; i < faults; ++i) plan.faults.push_back(draw_fault(random, plan));
  std::ranges::sort(plan.faults, {}, &Fault::at_ns);
  return plan;
}

}  // namespace mk::sim
