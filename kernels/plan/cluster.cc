#include "kernels/plan/cluster.h"

#include <algorithm>

#include "kernels/cuda/skeleton/launch_state.h"
#include "kernels/ops/ring/items.h"
#include "kernels/plan/bound.h"
#include "kernels/plan/experts.h"
#include "kernels/plan/model.h"
#include "kernels/plan/operator_work.h"
#include "kernels/plan/order.h"
#include "kernels/plan/two_shot.h"
#include "shm/limits.h"

namespace mk::kernels::plan {
namespace {

bool has_ring(Op op) { return op == Op::kAgGemm || op == Op::kRing || op == Op::kMoe; }

/// What a rail takes for so many bytes in commands of `chunk_bytes`.
double rail_us(const Machine& machine, double bytes, double chunk_bytes) {
  const double commands = std::max(1.0, bytes / std::max(1.0, chunk_bytes));
  return bytes / (machine.network_gb_s * 1e3) + commands * machine.network_command_us;
}

/// The network's time that AllGather+GEMM's ring takes longer than its bytes do.
double ring_us(const Problem& problem, const Machine& machine, const LaunchWork& work) {
  const double links = problem.nodes - 1.0;
  const double shard_bytes = work.network_bytes / links;
  const double chunks = std::max(1.0, work.commands / links - 1);
  const double chunk_bytes = shard_bytes / chunks;
  // A shard's header goes with its first chunk.
  const double piece = rail_us(machine, chunk_bytes, chunk_bytes) + machine.network_command_us +
                       machine.network_latency_us;
  const double shard = rail_us(machine, shard_bytes, chunk_bytes) + machine.network_command_us;
  return (links - 1) * std::max(0.0, piece - shard);
}

/// What the end of an exchange takes longer than with one other node.
double exchange_us(const Problem& problem, const Machine& machine, const Candidate& candidate,
                   const Timeline& time) {
  const double share = work_of(problem, candidate).network_bytes / (problem.nodes - 1.0);
  const double bytes = std::min<double>(candidate.tiling.chunk_bytes, share);
  const double chunk = rail_us(machine, bytes, bytes);
  // Of GEMM+ReduceScatter each node gets chunks of its own.
  const double last = problem.op == Op::kGemmAr ? (problem.nodes - 2.0) * chunk : 0;
  const double product = std::max(time.compute, time.local) + time.wait;
  const double rail = time.network + fill_tiles(problem, machine) * time.tile;
  return std::max(rail, product + last) - std::max(rail, product);
}

/// `network_us`: without the ring's.
Limit limit_of(const Problem& problem, const Machine& machine, const Timeline& time,
               double network_us) {
  const double ring = time.network - network_us;
  // The order has the others' rings (order.h).
  const bool ordered = problem.op == Op::kRing || problem.op == Op::kMoe;
  const double hops_us = (problem.nodes - 1.0) * machine.network_latency_us;
  if (ordered && std::max(hops_us, time.wait) > time.total / 2) return Limit::kLatency;
  if (time.network >= std::max(time.compute, time.local + time.passed))
    return ring > time.network / 2 ? Limit::kLatency : Limit::kNetwork;
  return time.compute >= time.local + time.passed ? Limit::kCompute : Limit::kLocal;
}

/// `product_us`: of its flops alone.
std::string advice_for(const Problem& problem, Exchange exchange, Limit limit, const Timeline& time,
                       double product_us) {
  constexpr double kMostlyEmpty = 2;
  const double others = std::max(time.compute, time.local + time.passed);
  switch (limit) {
    case Limit::kCompute:
      if (time.compute > kMostlyEmpty * product_us)
        return fmt::format(
            "the products take {:.1f} times as long as their flops: of so few rows of a rank tiles "
            "are mostly empty; more rows, or fewer nodes in a group",
            time.compute / std::max(product_us, 1e-9));
      return "the products take longest: more ranks, or a faster GPU";
    case Limit::kLocal:
      return "copies and sums within a node take longest: fewer ranks on a node, or larger k";
    case Limit::kNetwork:
      if (has_exchanges(problem) && exchange != Exchange::kTwoShot)
        return fmt::format(
            "the network takes {:.1f} times as long as all else: each node sends its sums to {} "
            "others; a two-shot exchange, fewer nodes, or GEMM+ReduceScatter and AllGather+GEMM",
            time.network / std::max(others, 1e-9), problem.nodes - 1);
      return fmt::format(
          "the network takes {:.1f} times as long as all else: faster NICs, or more rows on a node",
          time.network / std::max(others, 1e-9));
    case Limit::kLatency:
      break;
  }
  return "the ring's hops take longer than their bytes: fewer nodes in a group, or more rows";
}

void find_obstacles(const Problem& problem, const Machine& machine, ClusterPlan& plan) {
  const auto add = [&](std::string text) { plan.obstacles.push_back(std::move(text)); };
  if (plan.arrival_flags > shm::kFlagsMax)
    add(fmt::format("{} arrival flags, but a session has at most {}: fewer nodes in a group",
                    plan.arrival_flags, shm::kFlagsMax));
  if (machine.kind != MachineKind::kGpu) return;
  constexpr std::uint32_t kRunsMax = cuda::RingRuns::kMax;
  if (problem.op == Op::kRing && problem.ranks() > kRunsMax)
    add(
        fmt::format("Ring Attention's kernel takes at most {} ranks: fewer nodes in a group, and "
                    "longer shards",
                    kRunsMax));
  if (problem.nodes > 1 && plan.arrival_flags > cuda::kPolledFlagsMax)
    add(fmt::format("{} arrival flags, but a kernel looks at {} at most: fewer nodes in a group",
                    plan.arrival_flags, cuda::kPolledFlagsMax));
}

}  // namespace

Timeline predict_on_cluster(const Problem& problem, const Machine& machine,
                            const Candidate& candidate) {
  Timeline time = predict(problem, machine, candidate);
  if (machine.kind != MachineKind::kGpu || candidate.form == Mode::kUnfused) return time;
  const Problem one =
      problem.op == Op::kRing ? of_one_window(problem, machine.kind, candidate) : problem;
  if (one.heads.batch != problem.heads.batch || one.shape.n != problem.shape.n) {
    // Windows of heads come one after the other, each with an order of its own.
    const double windows = double{1} * problem.shape.n * std::max(1u, problem.heads.batch) /
                           (double{1} * one.shape.n * one.heads.batch);
    time.wait = windows * predict_on_cluster(one, machine, candidate).wait;
    time.total += time.wait;
    return time;
  }
  const auto work = work_by_plan(problem, machine.kind, candidate);
  if (!work) return time;
  if (!is_product(problem.op)) {
    // The order costs this beyond the longest leg. Legs hinder each other as predict() has it,
    // whose beginning has one latency and the routing plan.
    const double longest = std::max({time.compute, time.local, time.network, time.passed});
    double begun = problem.nodes > 1 ? machine.network_latency_us : 0;
    if (problem.op == Op::kMoe) begun += expert_terms(problem, machine, candidate).before;
    // Chunks are shown side by side, by those who bring or sum them.
    if (problem.op != Op::kRing) begun += work->steps * machine.chunk_flag_us;
    time.wait = ordered_us(problem, machine, candidate, *work, time) - begun - longest;
    if (problem.op == Op::kCombine) time.wait -= time.sums;
    time.total += time.wait;
    return time;
  }
  if (problem.nodes < 2) return time;
  if (problem.op == Op::kAgGemm) {
    time.network += ring_us(problem, machine, *work);
    time.total = std::max(time.total, time.launch + time.network + time.last);
  } else if (candidate.tiling.exchange == Exchange::kTwoShot) {
    time.total = std::max(time.total, time.launch + two_shot_us(problem, machine, candidate, time));
  } else {
    time.total += exchange_us(problem, machine, candidate, time);
  }
  return time;
}

Result<ClusterPlan> plan_cluster(const Problem& problem, const Machine& machine) {
  Problem fused = problem;
  fused.named.form = Mode::kFused;
  ClusterPlan plan;
  MK_ASSIGN_OR_RETURN(plan.choice, choose(fused, machine));
  const Candidate& candidate = plan.choice.candidate;
  MK_ASSIGN_OR_RETURN(const LaunchWork work, work_by_plan(fused, machine.kind, candidate));
  MK_ASSIGN_OR_RETURN(const OperatorMemory memory, memory_by_plan(fused, machine.kind, candidate));
  plan.time = predict_on_cluster(fused, machine, candidate);
  const Timeline& time = plan.time;
  MK_ASSIGN_OR_RETURN(const Bound bound, bound_of(fused, machine));
  plan.bound_us = bound.longest_us();
  plan.limit = limit_of(fused, machine, time, plan.choice.time.network);
  plan.advice = advice_for(fused, candidate.tiling.exchange, plan.limit, time, bound.compute_us);
  const std::uint64_t links = problem.nodes - 1;
  plan.network_bytes = static_cast<std::uint64_t>(work.network_bytes);
  plan.bytes_per_link =
      has_ring(problem.op) || links == 0 ? plan.network_bytes : plan.network_bytes / links;
  plan.commands = work.commands;
  // A link goes one way, and an endpoint has one datagram queue (tests/bench/verbs_footprint.cc).
  // Jobs with GPU memory have a second endpoint, and a queue pair that flushes.
  const std::uint64_t of_endpoint = 2 * links + 1;
  const std::uint64_t of_rail =
      machine.kind == MachineKind::kGpu ? 2 * of_endpoint + 1 : of_endpoint;
  plan.queue_pairs = links == 0 ? 0 : problem.locals * of_rail;
  plan.workspace_bytes = memory.workspace_bytes;
  plan.registered_bytes = links == 0 ? 0 : problem.locals * memory.workspace_bytes;
  plan.arrival_flags = memory.arrival_flags;
  find_obstacles(fused, machine, plan);
  return plan;
}

}  // namespace mk::kernels::plan
