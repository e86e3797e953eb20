#include "tests/sim/operators/costs.h"

#include <algorithm>
#include <cmath>

#include "kernels/comm/chunk_sender.h"
#include "kernels/comm/units.h"
#include "kernels/plan/accounted.h"
#include "kernels/plan/experts.h"
#include "kernels/plan/legal.h"
#include "kernels/plan/model.h"
#include "kernels/plan/operator_work.h"

namespace mk::sim {
namespace {

using kernels::LaunchWork;
using kernels::MachineRates;
namespace plan = kernels::plan;

/// Compute blocks are stood for by fewer threads, of which each computes as many tiles in a time as
/// its share of the blocks.
constexpr std::uint32_t kComputeThreadsMax = 12;

LocalRate always(double gb_s) { return {gb_s, gb_s}; }

/// The terms of kernels/plan/model.cc.
Costs product_costs(const plan::Problem& problem, const plan::Machine& machine,
                    const plan::Candidate& candidate) {
  const plan::Work work = plan::work_of(problem, candidate);
  const double stream = candidate.stream_warpgroups;
  const double receive = candidate.receive_warpgroups;
  const double tile = plan::tile_us(machine, candidate.tiling, work.steps, work.b_bytes);
  const double passes =
      problem.op == plan::Op::kAgGemm ? plan::gather_passes(problem, candidate) : 1;
  const auto product = [&](double blocks) {
    const double tiles =
        plan::product_us(machine, work.tiles, tile, blocks, candidate.tiling.tile_n);
    return plan::with_weights_us(machine, tiles, work.b_bytes, passes);
  };
  Costs costs;
  costs.compute_us = product(candidate.compute_blocks);
  costs.network_gb_s = machine.network_gb_s;
  costs.command_us = machine.network_command_us;
  costs.latency_us = machine.network_latency_us;
  if (problem.op == plan::Op::kAgGemm) {
    const double peers = problem.locals - 1.0;
    costs.launch_us = machine.launch_us_ag;
    if (!candidate.engines) {
      const double all = blocks_of_rank(problem, machine);
      const double receivers = std::ceil(receive / kernels::kWarpgroupsOfBlock);
      costs.gather_compute_us = product(all);
      costs.shared_compute_us =
          product(std::max<double>(candidate.compute_blocks, all - receivers));
    }
    if (peers > 0 && candidate.engines) {
      costs.share = always(machine.engine_gb_s);
      costs.pass_on = always(machine.engine_gb_s);
    } else if (peers > 0) {
      costs.share = always(plan::copy_rate_gb_s(machine, stream + receive, problem.locals - 1));
      costs.pass_on = always(
          plan::saturated_gb_s(machine, receive, machine.pass_on_gb_s, machine.rows_link_gb_s));
    }
    costs.own_slot_gb_s = machine.hbm_gb_s / 2;
    // Warpgroups' stores stand in the way of the product.
    if (peers > 0 && !candidate.engines) {
      const plan::Timeline time = plan::predict(problem, machine, candidate);
      const double beside = machine.copy_beside_share * std::min(costs.compute_us, time.local);
      costs.compute_us += beside;
      costs.gather_compute_us += beside;
      costs.shared_compute_us += beside;
    }
    return costs;
  }
  const bool scatter = problem.op == plan::Op::kGemmRs;
  const double alone = scatter ? machine.hbm_gb_s : machine.sums_link_gb_s;
  costs.launch_us = scatter ? machine.launch_us_rs : machine.launch_us_ar;
  costs.store_gb_s = problem.locals > 1 ? machine.link_gb_s : 0;
  costs.store_beside_share = machine.store_beside_share;
  const double sum_sent = problem.nodes == 1 ? (scatter ? machine.sum_gb_s : machine.sum_out_gb_s)
                          : scatter          ? machine.sum_sent_gb_s
                                             : machine.sum_sent_ar_gb_s;
  costs.sum_sent = {std::max(stream, 1.0) * sum_sent, alone};
  // Where a rank's shard is summed once, those that have summed for the others join.
  const double come = candidate.sums == plan::Sums::kOnce ? stream + receive : receive;
  costs.sum_come = {std::max(come, 1.0) * (scatter ? machine.sum_gb_s : machine.sum_come_gb_s),
                    alone};
  return costs;
}

/// The terms of kernels/plan/experts.cc.
void add_expert_costs(const plan::Problem& problem, const plan::Machine& machine,
                      const plan::Candidate& candidate, Costs& costs) {
  const plan::ExpertTerms terms = plan::expert_terms(problem, machine, candidate);
  const auto rate = [](double bytes, double us) { return always(us > 0 ? bytes / (us * 1e3) : 0); };
  const double link = plan::expert_link_bytes(problem);
  costs.one_memory = false;
  if (problem.op == plan::Op::kCombine) {
    costs.store_gb_s = machine.link_gb_s;
    // On one node most sums come when the product is done, and its SMs make them.
    costs.sum_sent = always(problem.nodes > 1 ? terms.sum_gb_s : machine.hbm_gb_s);
    costs.launch_us += terms.before;  // the index, before the first tile
    return;
  }
  const double own = link / problem.nodes;
  costs.share = rate(own, terms.share);
  costs.pass_on = rate(link - own, terms.passed);
  costs.pull = rate(double{1} * plan::tokens_of_rank(problem) * problem.experts.top_k *
                        problem.shape.k * kernels::kElementBytes,
                    terms.packed);
  costs.routing_us = terms.before;
}

/// Those of kernels/plan/account.cc, to which a rank's work is so many flops and bytes.
Result<Costs> accounted_costs(const plan::Problem& problem, const plan::Machine& machine,
                              const plan::Candidate& candidate) {
  MK_ASSIGN_OR_RETURN(const LaunchWork work, plan::work_by_plan(problem, machine.kind, candidate));
  const plan::Account account = plan::account_of(problem, machine, candidate);
  const MachineRates& rates = account.rates;
  Costs costs;
  costs.compute_us =
      std::max(account.least_compute_us, work.flops / std::max(1.0, rates.flops_per_s) * 1e6);
  costs.one_memory = true;
  costs.share = costs.pass_on = costs.sum_sent = costs.sum_come =
      always(rates.local_bytes_per_s / 1e9);
  costs.network_gb_s = rates.network_bytes_per_s / 1e9;
  costs.command_us = rates.command_ns / 1e3;
  costs.launch_us = account.fused_us;
  // The account has the latency of the first arrival in its beginning.
  if (machine.kind == plan::MachineKind::kGpu && problem.nodes > 1) {
    costs.latency_us = machine.network_latency_us;
    costs.launch_us -= machine.network_latency_us;
  }
  if (machine.kind == plan::MachineKind::kGpu && problem.op == plan::Op::kRing)
    costs.commit_us = kernels::kCommitUs;
  if (machine.kind == plan::MachineKind::kGpu && problem.op != plan::Op::kRing)
    add_expert_costs(problem, machine, candidate, costs);
  return costs;
}

}  // namespace

Result<Costs> costs_of(const plan::Problem& problem, const plan::Machine& machine,
                       const plan::Candidate& candidate) {
  Costs costs;
  if (machine.kind == plan::MachineKind::kGpu && plan::is_product(problem.op)) {
    costs = product_costs(problem, machine, candidate);
  } else {
    MK_ASSIGN_OR_RETURN(costs, accounted_costs(problem, machine, candidate));
  }
  // An item of attention is so long that it counts how many there are to a block. So is a tile of
  // experts' rows, of which there may be one to a block.
  const bool long_tiles = !plan::is_product(problem.op) && machine.kind == plan::MachineKind::kGpu;
  costs.compute_threads = std::max(1u, candidate.compute_blocks);
  if (!long_tiles) costs.compute_threads = std::min(costs.compute_threads, kComputeThreadsMax);
  return costs;
}

}  // namespace mk::sim
