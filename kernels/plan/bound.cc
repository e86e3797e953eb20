#include "kernels/plan/bound.h"

#include <algorithm>

#include "kernels/plan/account.h"
#include "kernels/plan/accounted.h"
#include "kernels/plan/choose.h"
#include "kernels/plan/collective.h"
#include "kernels/plan/legal.h"
#include "kernels/plan/operator_work.h"

namespace mk::kernels::plan {
namespace {

constexpr double kBytesOfGb = 1e9;
constexpr double kUsOfSecond = 1e6;

/// Of all SMs that the rank has, at the clock of a short product.
double gpu_flops_per_s(const Problem& problem, const Machine& machine) {
  const double share = problem.op == Op::kRing ? machine.attention_share : 1;
  return share * blocks_of_rank(problem, machine) * sm_flops_per_s(machine);
}

/// Weights are read from memory once at least.
double weights_us(const Problem& problem, const Machine& machine, const Candidate& candidate) {
  const double bytes =
      is_product(problem.op) ? work_of(problem, candidate).b_bytes : expert_bytes(problem);
  return bytes / (machine.weights_gb_s * kBytesOfGb) * kUsOfSecond;
}

/// The work as the leg over NVLink has it.
LaunchWork gpu_work(const Problem& problem, const Candidate& candidate, LaunchWork work) {
  if (is_product(problem.op)) {
    const Work product = work_of(problem, candidate);
    work.local_bytes = product.link_bytes + product.result_bytes + product.passed_bytes;
  } else {
    work.local_bytes = link_bytes(problem, work);
  }
  return work;
}

}  // namespace

double Bound::longest_us() const { return std::max({compute_us, network_us, local_us}); }

const char* Bound::limit() const {
  const double longest = longest_us();
  return longest == compute_us ? "compute" : longest == network_us ? "network" : "local";
}

Bound& Bound::operator+=(const Bound& next) {
  compute_us += next.compute_us;
  network_us += next.network_us;
  local_us += next.local_us;
  return *this;
}

Result<Bound> bound_of(const Problem& problem, const Machine& machine, const Measured& measured) {
  const bool on_gpu = machine.kind == MachineKind::kGpu;
  if (on_gpu && problem.rows_alone) return bound_of(collective_of(problem), machine, measured);
  Problem fused = problem;
  fused.named.form = Mode::kFused;
  MK_ASSIGN_OR_RETURN(const Choice choice, choose(fused, machine));
  MK_ASSIGN_OR_RETURN(LaunchWork work, work_by_plan(fused, machine.kind, choice.candidate));
  if (on_gpu) work = gpu_work(fused, choice.candidate, work);
  work.commands = 0;
  MachineRates rates;
  rates.network_bytes_per_s = measured.network_gb_s * kBytesOfGb;
  rates.local_bytes_per_s = measured.local_gb_s * kBytesOfGb;
  if (on_gpu) rates.flops_per_s = gpu_flops_per_s(fused, machine);
  if (rates.network_bytes_per_s <= 0) rates.network_bytes_per_s = machine.network_gb_s * kBytesOfGb;
  if (on_gpu && rates.local_bytes_per_s <= 0)
    rates.local_bytes_per_s = std::max(machine.link_gb_s, machine.rows_link_gb_s) * kBytesOfGb;
  const RankShare share{problem.locals, std::max(1u, choice.candidate.compute_blocks), 0};
  const Timeline legs = predict(work, rank_rates(machine, rates, share), Mode::kUnfused);
  Bound bound{legs.compute, legs.network, legs.local};
  if (on_gpu)
    bound.compute_us = std::max(bound.compute_us, weights_us(fused, machine, choice.candidate));
  return bound;
}

}  // namespace mk::kernels::plan
