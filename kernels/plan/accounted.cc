#include "kernels/plan/accounted.h"

#include <algorithm>
#include <iterator>
#include <limits>

#include "kernels/comm/launch.h"
#include "kernels/comm/units.h"
#include "kernels/ops/ring/spec.h"
#include "kernels/plan/experts.h"
#include "kernels/plan/legal.h"
#include "kernels/plan/model.h"
#include "kernels/plan/operator_work.h"

namespace mk::kernels::plan {
namespace {

constexpr std::uint32_t kKib = 1024;
constexpr double kBytesOfGb = 1e9;

std::uint32_t key_heads_of(const Problem& problem) {
  return problem.heads.key_heads != 0 ? problem.heads.key_heads : problem.shape.n;
}

/// 0: the plan's own, on which all ranks agree. Of smaller ones each costs a command, of larger
/// ones the first comes late.
std::vector<std::uint32_t> chunks_of(const Problem& problem) {
  if (problem.named.tiling.chunk_bytes != 0) return {problem.named.tiling.chunk_bytes};
  if (problem.ranks() == 1) return {0};
  return {0, 64 * kKib, 256 * kKib, 1024 * kKib};
}

/// Of a GPU, whose blocks are placed.
void add_if_legal(const Problem& problem, const Machine& machine, Candidate candidate, Mode form,
                  std::vector<Candidate>& legal) {
  if (problem.named.form.value_or(form) != form) return;
  candidate.form = form;
  if (!place_warpgroups(problem, machine, candidate) ||
      !check_candidate(problem, machine, candidate))
    return;
  legal.push_back(candidate);
}

}  // namespace

Timeline Account::predict(const LaunchWork& work, Mode form) const {
  LaunchWork whole = work;
  whole.flops = std::max(whole.flops, least_compute_us * rates.flops_per_s / 1e6);
  Timeline time = plan::predict(whole, rates, form);
  if (copies_us > 0) {
    time.local += copies_us;
    if (form == Mode::kUnfused) time.total += copies_us;
  }
  time.passed = passed_us_per_byte * work.network_bytes;
  const double beside_network = std::max(0.0, time.passed - time.network);
  const double sums = sums_us_per_flop * work.flops;
  if (form == Mode::kUnfused) {
    time.sums = sums;
    time.total += beside_network + sums;
    // Product rows are stored where they are summed, whatever the form.
    if (sums > 0) time.total -= std::min(time.compute, time.local);
  }
  if (overlap > 0 && form == Mode::kFused) {
    const double network = time.network + beside_network;
    const double longest = std::max({time.compute, time.local, network});
    const double legs =
        overlapped_us(overlap, time.compute, overlapped_us(overlap, time.local, network));
    // What the soft edge adds: the first and last tiles beside nothing.
    time.last = legs - longest;
    time.sums = std::max(last_sums * sums, sums - legs);
    time.wait = std::max(0.0, first_share * time.local - own_share * time.compute);
    time.total = legs + time.launch + time.sums + time.wait;
  }
  const double begun =
      before_us_per_flop * work.flops + (form == Mode::kUnfused ? unfused_us : fused_us);
  time.launch += begun;
  time.total += begun;
  return time;
}

Estimate Account::expected(const LaunchWork& work) const {
  return estimate_of(predict(work, Mode::kFused), predict(work, Mode::kUnfused));
}

double link_bytes(const Problem& problem, const LaunchWork& work) {
  if (problem.op != Op::kRing) return expert_link_bytes(problem);
  // Keys are read once for all of the others.
  return work.local_bytes * (problem.locals - 1) / problem.locals;
}

namespace {

/// The legs of experts, of whose work the plan's account tells the amounts alone.
void add_expert_terms(const Problem& problem, const Machine& machine, const Candidate& candidate,
                      bool local_told, Account& account) {
  const auto work = work_by_plan(problem, machine.kind, candidate);
  if (!work) return;
  const ExpertTerms terms = expert_terms(problem, machine, candidate);
  if (work->flops > 0) account.before_us_per_flop = terms.before / work->flops;
  if (work->network_bytes > 0) account.passed_us_per_byte = terms.passed / work->network_bytes;
  if (work->flops > 0) account.sums_us_per_flop = terms.sums / work->flops;
  account.last_sums = terms.last_sums;
  // A rank alone on its node stores its rows where they are summed: nothing crosses NVLink.
  if (!local_told)
    account.rates.local_bytes_per_s = terms.local > 0 ? work->local_bytes / terms.local * 1e6
                                                      : std::numeric_limits<double>::infinity();
}

/// The copies of Ring Attention's engines.
void add_engine_terms(const Problem& problem, const Machine& machine, const Candidate& candidate,
                      bool local_told, Account& account) {
  if (!candidate.engines) return;
  constexpr double kCopies = 3;  // K, V and flags, of heads together, to a peer
  const double units = double{1} * std::max(1u, problem.heads.batch) * key_heads_of(problem) /
                       std::max(1u, candidate.heads_together);
  const double peers = problem.locals - 1.0;
  account.copies_us = kCopies * units * peers * machine.engine_each_us;
  // Rows of 256 bytes that lie apart are as quick as bytes that follow each other.
  const double of_link = (peers + 1) / peers;
  if (!local_told) account.rates.local_bytes_per_s = of_link * machine.engine_gb_s * kBytesOfGb;
  // The first items need all heads that come together, beside which they have their own keys.
  const double items =
      double{1} * std::max(1u, problem.heads.batch) * problem.shape.n *
      div_up(div_up(problem.shape.m, problem.ranks()), ring_tile_queries(problem.shape.k));
  account.first_share = 1 / units;
  const double compute = std::max(1u, candidate.compute_blocks);
  account.own_share = 1 / (std::max(1.0, items / compute) * problem.ranks());
}

}  // namespace

Account account_of(const Problem& problem, const Machine& machine, const Candidate& candidate,
                   const MachineRates& told) {
  RankShare share{problem.locals, std::max(1u, candidate.compute_blocks), 0};
  Account account;
  if (machine.kind == MachineKind::kCpu) {
    account.rates = rank_rates(machine, told, share);
    return account;
  }
  MachineRates known = told;
  // Ring Attention's keys are read once for all of the node's other ranks.
  const double others = std::max(1u, problem.locals - 1);
  const double of_link = (others + 1) / others;
  const std::uint32_t warpgroups = candidate.stream_warpgroups + candidate.receive_warpgroups -
                                   std::min(watchers_of(problem), candidate.stream_warpgroups);
  if (known.local_bytes_per_s <= 0)
    known.local_bytes_per_s =
        of_link * kBytesOfGb * copy_rate_gb_s(machine, warpgroups, problem.locals - 1);
  account.rates = rank_rates(machine, known, share);
  if (problem.op != Op::kRing) {
    // A tile of experts begins and ends by itself.
    const double steps = problem.shape.k / 64.0 * machine.step_us_256;
    if (told.flops_per_s <= 0)
      account.rates.flops_per_s *= machine.experts_share * steps / (steps + machine.tile_us_256);
    add_expert_terms(problem, machine, candidate, told.local_bytes_per_s > 0, account);
  } else {
    if (told.flops_per_s <= 0) account.rates.flops_per_s *= machine.attention_share;
    add_engine_terms(problem, machine, candidate, told.local_bytes_per_s > 0, account);
  }
  account.overlap = machine.overlap_accounted;
  account.fused_us = machine.launch_us_accounted;
  account.unfused_us = machine.unfused_us_ag;
  if (problem.nodes > 1) {
    account.fused_us += machine.network_latency_us;
    account.unfused_us += machine.network_latency_us;
  }
  // With two thirds of an H200's SMs the rate falls (tests/bench/results/moe_h200_*_sweep.json).
  const double weights_gb_s =
      std::min(machine.weights_gb_s, machine.weights_sm_gb_s * share.compute_blocks);
  account.least_compute_us = expert_bytes(problem) / (weights_gb_s * 1e3);
  return account;
}

namespace {

// Of experts, where ranks share a GPU and nothing is chosen.
constexpr std::uint32_t kExperts = 36;
constexpr std::uint32_t kExpertsReceive = 6;
/// GEMM+Combine takes no more: no recorded launch is quicker with them.
constexpr std::uint32_t kCombineMost = 108;

bool has_receivers(std::uint32_t nodes, std::uint32_t locals) { return nodes > 1 && locals > 1; }

/// Ways to a node's other ranks that are tried.
struct Transports {
  bool groups = true;
  bool engines = false;
};
Transports transports_of(const Problem& problem) {
  if (problem.op != Op::kRing && problem.op != Op::kMoe) return {};
  // Ranks that share a GPU have engines only if they are named, and so have tokens over nodes,
  // where nobody has measured them.
  const bool alone =
      problem.ranks_per_device == 1 && (problem.op == Op::kRing || problem.nodes == 1);
  // A caller that names engines wants them alone.
  return {!problem.named.engines.value_or(false),
          problem.named.engines.value_or(alone) && check_row_engines(problem)};
}

/// Copy engines of Ring Attention, beside which only SMs share that no role could compute with.
std::vector<AccountedGroups> engines_to_try(const Problem& problem, const Machine& machine) {
  std::vector<AccountedGroups> engines;
  const std::uint32_t share = blocks_of_rank(problem, machine);
  AccountedGroups groups = problem.ranks_per_device > 1
                               ? accounted_groups(problem.op, problem.nodes, problem.locals)
                               : accounted_groups(problem.op, problem.nodes, problem.locals,
                                                  share > kBlocksMax ? share - kBlocksMax : 1);
  groups.engines = true;
  const std::uint32_t key_heads = key_heads_of(problem);
  for (groups.heads_together = 1; ring_heads_fit(key_heads, groups.heads_together);
       groups.heads_together *= 2)
    engines.push_back(groups);
  return engines;
}

/// Those of experts are among the ones that products have run with.
void add_expert_groups(const Problem& problem, std::vector<AccountedGroups>& groups) {
  const bool receives = problem.op == Op::kMoe && has_receivers(problem.nodes, problem.locals);
  for (const std::uint32_t stream : {12u, 18u, 24u, 36u, 48u, 60u, 72u, 108u, 144u, 192u}) {
    if (stream > kCombineMost && problem.op == Op::kCombine) break;
    for (const std::uint32_t receive : {6u, 12u, 24u, 48u}) {
      groups.push_back({stream, receives ? receive : 0});
      if (!receives) break;
    }
  }
}

/// Several numbers of a whole GPU, the usual one first.
std::vector<AccountedGroups> groups_to_try(const Problem& problem, const Machine& machine) {
  std::vector<AccountedGroups> groups{accounted_groups(problem.op, problem.nodes, problem.locals)};
  const Transports transports = transports_of(problem);
  if (problem.op == Op::kRing) {
    for (const std::uint32_t sms : {6u, 8u, 10u, 12u, 16u}) {
      if (problem.ranks() > 1 && problem.ranks_per_device == 1)
        groups.push_back(accounted_groups(problem.op, problem.nodes, problem.locals, sms));
    }
    if (!transports.groups) groups.clear();
    if (transports.engines)
      std::ranges::copy(engines_to_try(problem, machine), std::back_inserter(groups));
    return groups;
  }
  if (problem.ranks_per_device == 1) add_expert_groups(problem, groups);
  // The same numbers beside engines: warpgroups pack tokens either way.
  const std::vector<AccountedGroups> alone = groups;
  if (!transports.groups) groups.clear();
  if (transports.engines) {
    for (AccountedGroups beside : alone) {
      beside.engines = true;
      groups.push_back(beside);
    }
  }
  return groups;
}

}  // namespace

Status check_row_engines(const Problem& problem) {
  Candidate candidate;
  candidate.engines = true;
  return work_by_plan(problem, MachineKind::kGpu, candidate).map([](const LaunchWork&) {});
}

AccountedGroups accounted_groups(Op op, std::uint32_t nodes, std::uint32_t locals,
                                 std::uint32_t sms) {
  const bool receivers = has_receivers(nodes, locals);
  if (op != Op::kRing) return {kExperts, receivers && op == Op::kMoe ? kExpertsReceive : 0};
  // Four SMs compute nothing, as a role has kBlocksMax blocks.
  const std::uint32_t ring_all = sms * kWarpgroupsOfBlock;
  if (nodes * locals == 1) return {0, 0};
  // Without those that watch, one for each node, that which sends, and the poller's place.
  const std::uint32_t ring = ring_all - std::min(ring_all / 2, nodes + (nodes > 1 ? 2 : 1));
  return {receivers ? ring / 2 : ring, receivers ? ring / 2 : 0};
}

Candidate accounted_candidate(const Problem& problem, const AccountedGroups& groups) {
  const Named& named = problem.named;
  const auto number = [&](std::uint32_t own, std::uint32_t of_whole) {
    if (of_whole == 0) return 0u;
    return own != 0 ? own : div_up(of_whole, std::max(1u, problem.ranks_per_device));
  };
  Candidate candidate;
  candidate.tiling = named.tiling;
  candidate.engines = groups.engines;
  candidate.heads_together = groups.heads_together;
  if (problem.nodes > 1) candidate.send_warpgroups = std::max(1u, named.send_warpgroups);
  candidate.receive_warpgroups = number(named.receive_warpgroups, groups.receive);
  const std::uint32_t stream = groups.stream == 0 ? 0 : groups.stream + watchers_of(problem);
  candidate.stream_warpgroups = number(named.stream_warpgroups, stream);
  if (stream != 0 && named.stream_warpgroups == 0) {
    // Sessions of several ranks have a poller, on one node for what ends launches.
    const std::uint32_t besides =
        (problem.ranks() > 1 ? 1 : 0) + candidate.send_warpgroups + candidate.receive_warpgroups;
    const std::uint32_t blocks = div_up(besides + candidate.stream_warpgroups, kWarpgroupsOfBlock);
    candidate.stream_warpgroups = blocks * kWarpgroupsOfBlock - besides;
  }
  return candidate;
}

AccountedGroups chosen_groups(const Problem& problem, const Machine& machine,
                              const LaunchWork& work, const MachineRates& told) {
  AccountedGroups best;
  double least = std::numeric_limits<double>::infinity();
  const std::uint32_t most = std::max(1u, blocks_of_rank(problem, machine) / 2);
  for (const AccountedGroups& groups : groups_to_try(problem, machine)) {
    Candidate candidate = accounted_candidate(problem, groups);
    if (blocks_outside(problem, candidate) > most || !place_warpgroups(problem, machine, candidate))
      continue;
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
  if (machine.kind == MachineKind::kCpu) {
    Candidate candidate;
    candidate.tiling = problem.named.tiling;
    candidate.compute_blocks = std::max(1u, problem.named.compute_blocks);
    for (const Exchange exchange : exchanges_of(problem)) {
      candidate.tiling.exchange = exchange;
      for (std::uint32_t chunk : chunks_of(problem)) {
        candidate.tiling.chunk_bytes = chunk;
        for (Mode form : {Mode::kFused, Mode::kUnfused})
          add_if_legal(problem, machine, candidate, form, legal);
      }
    }
    return legal;
  }
  std::vector<AccountedGroups> tried = groups_to_try(problem, machine);
  if (tried.empty()) return legal;
  // A caller that names warpgroups wants them to share, unless it names copy engines, too.
  if (problem.named.stream_warpgroups != 0 && (problem.op != Op::kRing || !tried.front().engines))
    tried.resize(1);
  for (const AccountedGroups& groups : tried)
    add_if_legal(problem, machine, accounted_candidate(problem, groups), Mode::kFused, legal);
  // The unfused form has what the operator was made with, for fused launches.
  AccountedGroups chosen = tried.front();
  if (const auto work = work_by_plan(problem, machine.kind, {}); work && tried.size() > 1)
    chosen = chosen_groups(problem, machine, *work);
  add_if_legal(problem, machine, accounted_candidate(problem, chosen), Mode::kUnfused, legal);
  return legal;
}

}  // namespace mk::kernels::plan
