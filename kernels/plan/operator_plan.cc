#include "kernels/plan/operator_plan.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels/plan/account.h"
#include "kernels/plan/legal.h"
#include "kernels/plan/operator_work.h"
#include "shm/host/result.h"

namespace mk::kernels::plan {
namespace {

constexpr double kBytesOfGb = 1e9;
constexpr double kNsOfUs = 1e3;

}  // namespace

Machine with_rates(const Machine& machine, const MachineRates& rates) {
  Machine told = machine;
  if (rates.network_bytes_per_s > 0) told.network_gb_s = rates.network_bytes_per_s / kBytesOfGb;
  if (machine.kind == MachineKind::kCpu) {
    if (rates.network_bytes_per_s > 0) told.cpu_network_in_turns_gb_s = told.network_gb_s;
    if (rates.local_bytes_per_s > 0) told.cpu_memory_gb_s = rates.local_bytes_per_s / kBytesOfGb;
    if (rates.command_ns > 0) told.cpu_command_us = rates.command_ns / kNsOfUs;
    if (rates.step_ns > 0) told.cpu_step_us = told.cpu_step_in_turns_us = rates.step_ns / kNsOfUs;
    return told;
  }
  if (rates.command_ns > 0) told.network_command_us = rates.command_ns / kNsOfUs;
  if (rates.step_ns > 0) told.chunk_flag_us = rates.step_ns / kNsOfUs;
  if (rates.local_bytes_per_s > 0) {
    // All that a link carries keeps its proportion.
    const double times = rates.local_bytes_per_s / kBytesOfGb / machine.link_gb_s;
    for (double Machine::*rate : {&Machine::link_gb_s, &Machine::rows_link_gb_s,
                                  &Machine::sums_link_gb_s, &Machine::engine_gb_s}) {
      told.*rate *= times;
    }
  }
  if (rates.flops_per_s > 0) {
    const double whole = machine.sms * sm_flops_per_s(machine);
    for (double Machine::*time :
         {&Machine::step_us_256, &Machine::step_us_128, &Machine::step_us_64, &Machine::tile_us_256,
          &Machine::tile_us_128}) {
      told.*time *= whole / rates.flops_per_s;
    }
  }
  return told;
}

Estimate OperatorPlan::expected(std::uint32_t m) const {
  Problem launch = problem;
  launch.shape.m = m;
  Candidate as = candidate;
  as.form = Mode::kFused;
  const Timeline fused = predict(launch, machine, as);
  as.form = Mode::kUnfused;
  return estimate_of(fused, predict(launch, machine, as));
}

Mode OperatorPlan::form(std::uint32_t m, const Estimate& expected) const {
  Problem launch = problem;
  launch.shape.m = m;
  const TunedEntry* const entry = blocks_of_rank(problem, machine) >= machine.sms
                                      ? job->tuned.find(launch, machine.name)
                                      : nullptr;
  return entry != nullptr ? entry->candidate.form : expected.cheaper();
}

bool OperatorPlan::spans(std::uint32_t m) const {
  Problem launch = problem;
  launch.shape.m = m;
  return spans_shards(launch, machine, candidate);
}

Result<OperatorPlan> plan_operator(const Problem& problem, std::shared_ptr<const JobPlan> job,
                                   const MachineRates& rates) {
  OperatorPlan made;
  made.problem = problem;
  made.problem.named.form = Mode::kFused;
  made.machine = with_rates(job->machine, rates);
  MK_ASSIGN_OR_RETURN(const Choice choice, choose(made.problem, made.machine, &job->tuned));
  made.candidate = choice.candidate;
  made.job = std::move(job);
  return made;
}

Tiling with_exchange(Problem problem, const Tiling& tiling) {
  Tiling chosen = tiling;
  if (!has_exchanges(problem) || tiling.exchange != Exchange::kAuto) return chosen;
  static const Machine machine = shipped_machine("CPU").value_or(Machine{});
  problem.named.form = Mode::kFused;
  double least = HUGE_VAL;
  for (const Exchange exchange : exchanges_of(problem)) {
    Candidate candidate;
    candidate.tiling = tiling;
    candidate.tiling.exchange = exchange;
    candidate.compute_blocks = 1;
    if (!check_plan(problem, machine.kind, candidate.tiling)) continue;
    const double total = predict(problem, machine, candidate).total;
    if (total >= least) continue;
    least = total;
    chosen.exchange = exchange;
  }
  return chosen;
}

std::uint32_t tile_pace_ns(const Problem& problem, const Machine& machine,
                           const Candidate& candidate) {
  // Math is at the next tile while one leaves, so that it has nearly that one's time for it.
  constexpr double kOfTile = 0.75;
  constexpr std::uint32_t kPieceColumns = 64;
  constexpr double kMostUs = 1000;
  // Of ranks that share a GPU it has not been measured.
  if (problem.op == Op::kAgGemm || problem.nodes != 1 || problem.locals == 1 ||
      problem.ranks_per_device != 1) {
    return 0;
  }
  const Work work = work_of(problem, candidate);
  const double tile = tile_us(machine, candidate.tiling, work.steps, work.b_bytes);
  const double product = work.tiles * tile / std::max(1u, candidate.compute_blocks);
  const double link = (work.link_bytes + work.result_bytes) / (machine.link_gb_s * kNsOfUs);
  if (product <= link) return 0;
  const std::uint32_t pieces = div_up(candidate.tiling.tile_n, kPieceColumns);
  return static_cast<std::uint32_t>(std::min(kOfTile * tile / pieces, kMostUs) * kNsOfUs);
}

}  // namespace mk::kernels::plan
