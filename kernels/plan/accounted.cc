#include "kernels/plan/accounted.h"

#include <algorithm>
#include <limits>

#include "kernels/comm/units.h"
#include "kernels/plan/legal.h"
#include "kernels/plan/model.h"
#include "kernels/plan/operator_work.h"

namespace mk::kernels::plan {
namespace {

constexpr std::uint32_t kKib = 1024;

std::vector<Mode> forms_of(const Problem& problem) {
  if (problem.named.form) return {*problem.named.form};
  return {Mode::kFused, Mode::kUnfused};
}

/// 0: the plan's own. Of smaller ones each costs a command, of larger ones the first comes late.
std::vector<std::uint32_t> chunks_of(const Problem& problem) {
  if (problem.named.tiling.chunk_bytes != 0) return {problem.named.tiling.chunk_bytes};
  if (problem.ranks() == 1) return {0};
  return {0, 64 * kKib, 256 * kKib, 1024 * kKib};
}

void add_if_legal(const Problem& problem, const Machine& machine, Candidate candidate,
                  std::vector<Candidate>& legal) {
  if (!place_warpgroups(problem, machine, candidate) ||
      !check_candidate(problem, machine, candidate))
    return;
  for (Mode form : forms_of(problem)) {
    candidate.form = form;
    legal.push_back(candidate);
  }
}

}  // namespace

Timeline Account::predict(const LaunchWork& work, Mode form) const {
  LaunchWork whole = work;
  whole.flops = std::max(whole.flops, least_compute_us * rates.flops_per_s / 1e6);
  Timeline time = plan::predict(whole, rates, form);
  if (overlap > 0 && form == Mode::kFused) {
    const double longest = std::max({time.compute, time.local, time.network});
    const double legs =
        overlapped_us(overlap, time.compute, overlapped_us(overlap, time.local, time.network));
    // What the soft edge adds: the first and last tiles beside nothing.
    time.last = legs - longest;
    time.total = legs + time.launch;
  }
  const double begun = form == Mode::kUnfused ? unfused_us : fused_us;
  time.launch += begun;
  time.total += begun;
  return time;
}

Estimate Account::expected(const LaunchWork& work) const {
  return estimate_of(predict(work, Mode::kFused), predict(work, Mode::kUnfused));
}

double link_bytes(const Problem& problem, const LaunchWork& work) {
  const double others = problem.locals - 1.0;
  const double tokens = tokens_of_rank(problem);
  switch (problem.op) {
    case Op::kRing:  // keys are read once for all of the others
      return work.local_bytes * others / (others + 1);
    case Op::kMoe:  // each token of the rank's rail, to every other
      return tokens * problem.nodes * others * problem.shape.k * kElementBytes;
    case Op::kCombine:  // a product row, to its token's rail
      return tokens * problem.experts.top_k * problem.shape.n * bytes_of(problem.result.partials) *
             others / problem.locals;
    default:
      return 0;
  }
}

Account account_of(const Problem& problem, const Machine& machine, const Candidate& candidate,
                   const MachineRates& told) {
  constexpr double kBytesOfGb = 1e9;
  RankShare share{problem.locals, std::max(1u, candidate.compute_blocks), 0};
  Account account;
  if (machine.kind == MachineKind::kCpu) {
    account.rates = rank_rates(machine, told, share);
    return account;
  }
  MachineRates known = told;
  // Half of what is read and written crosses the link. Ring Attention reads its keys once for all
  // of the node's other ranks.
  const double others = std::max(1u, problem.locals - 1);
  const double of_link = problem.op == Op::kRing ? (others + 1) / others : 2;
  const double warpgroups = candidate.stream_warpgroups + candidate.receive_warpgroups;
  if (known.local_bytes_per_s <= 0)
    known.local_bytes_per_s =
        of_link * kBytesOfGb * copy_rate_gb_s(machine, warpgroups, problem.locals - 1);
  account.rates = rank_rates(machine, known, share);
  if (problem.op == Op::kRing && told.flops_per_s <= 0)
    account.rates.flops_per_s *= machine.attention_share;
  // Each begins and ends like a gather.
  account.overlap = machine.overlap_ag;
  account.fused_us = machine.launch_us_ag;
  account.unfused_us = machine.unfused_us_ag;
  if (problem.nodes > 1) {
    account.fused_us += machine.network_latency_us;
    account.unfused_us += machine.network_latency_us;
  }
  account.least_compute_us = expert_bytes(problem) / (machine.weights_gb_s * 1e3);
  return account;
}

AccountedGroups accounted_groups(Op op, std::uint32_t nodes, std::uint32_t locals,
                                 std::uint32_t sms) {
  // Ring Attention: four SMs compute nothing, as a role has kBlocksMax blocks. That of experts is a
  // guess that no sweep has judged.
  const std::uint32_t ring_all = sms * kWarpgroupsOfBlock;
  constexpr std::uint32_t kExperts = 36;
  constexpr std::uint32_t kExpertsReceive = 6;
  const bool receivers = nodes > 1 && locals > 1;
  if (op != Op::kRing) return {kExperts, receivers && op == Op::kMoe ? kExpertsReceive : 0};
  if (nodes * locals == 1) return {0, 0};
  // Without those that watch, one for each node, that which sends, and the poller's place.
  const std::uint32_t ring = ring_all - std::min(ring_all / 2, nodes + (nodes > 1 ? 2 : 0));
  return {receivers ? ring / 2 : ring, receivers ? ring / 2 : 0};
}

namespace {

/// Where Ring Attention's SMs may be taken from attention: several numbers of them.
std::vector<AccountedGroups> groups_to_try(const Problem& problem) {
  std::vector<AccountedGroups> groups{accounted_groups(problem.op, problem.nodes, problem.locals)};
  if (problem.op != Op::kRing || problem.ranks() == 1 || problem.ranks_per_device > 1)
    return groups;
  for (const std::uint32_t sms : {6u, 8u, 10u, 12u, 16u})
    groups.push_back(accounted_groups(problem.op, problem.nodes, problem.locals, sms));
  return groups;
}

}  // namespace

AccountedGroups chosen_groups(const Problem& problem, const Machine& machine,
                              const LaunchWork& work, const MachineRates& told) {
  AccountedGroups best;
  double least = std::numeric_limits<double>::infinity();
  for (const AccountedGroups& groups : groups_to_try(problem)) {
    Candidate candidate;
    candidate.stream_warpgroups = groups.stream;
    candidate.receive_warpgroups = groups.receive;
    if (problem.nodes > 1) candidate.send_warpgroups = 1;
    if (!place_warpgroups(problem, machine, candidate)) continue;
    const double us =
        account_of(problem, machine, candidate, told).predict(work, Mode::kFused).total;
    if (us >= least) continue;
    least = us;
    best = groups;
  }
  return best.stream != 0 ? best : accounted_groups(problem.op, problem.nodes, problem.locals);
}

std::vector<Candidate> accounted_candidates(const Problem& problem, const Machine& machine) {
  std::vector<Candidate> legal;
  const Named& named = problem.named;
  Candidate candidate;
  candidate.tiling = named.tiling;
  candidate.compute_blocks = std::max(1u, named.compute_blocks);
  std::vector<AccountedGroups> tried{AccountedGroups{}};
  if (machine.kind == MachineKind::kGpu) {
    tried = groups_to_try(problem);
    if (named.stream_warpgroups != 0) tried.resize(1);
    if (problem.nodes > 1) candidate.send_warpgroups = std::max(1u, named.send_warpgroups);
  }
  for (const AccountedGroups& groups : tried) {
    const auto number = [&](std::uint32_t own, std::uint32_t of_whole) {
      if (of_whole == 0) return 0u;
      return own != 0 ? own : div_up(of_whole, std::max(1u, problem.ranks_per_device));
    };
    candidate.stream_warpgroups = number(named.stream_warpgroups, groups.stream);
    candidate.receive_warpgroups = number(named.receive_warpgroups, groups.receive);
    for (std::uint32_t chunk : chunks_of(problem)) {
      candidate.tiling.chunk_bytes = chunk;
      add_if_legal(problem, machine, candidate, legal);
    }
  }
  return legal;
}

}  // namespace mk::kernels::plan
