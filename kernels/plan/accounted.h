/// \file
/// Problems whose launches are predicted by their plan's account of the work (account.h): all on
/// CPUs; Ring Attention, MoE Dispatch and GEMM+Combine on GPUs. Host only.
#pragma once

#include <vector>

#include "kernels/plan/account.h"
#include "kernels/plan/candidate.h"
#include "kernels/plan/machine.h"

namespace mk::kernels::plan {

/// What one rank's launches of a candidate are predicted by, whatever their work is.
struct Account {
  MachineRates rates;
  double fused_us = 0;  ///< begin, end, flags
  double unfused_us = 0;
  /// Of a GPU: how sharply the longest leg hides the others (overlapped_us), in place of steps.
  double overlap = 0;
  // Ring Attention by copy engines.
  double copies_us = 0;         ///< of all copies besides their bytes
  double first_share = 0;       ///< of the bytes: without them no item ends
  double own_share = 0;         ///< of computing: the first items' with the rank's own keys
  double least_compute_us = 0;  ///< experts' weights come from memory once
  // Of experts on a GPU (experts.h), in proportion to the launch's work.
  double before_us_per_flop = 0;
  double passed_us_per_byte = 0;  ///< of the network's
  double sums_us_per_flop = 0;    ///< summed as the product's rows come
  double last_sums = 0;           ///< of these, as a share, when the product is done

  Timeline predict(const LaunchWork& work, Mode form) const;
  Estimate expected(const LaunchWork& work) const;
};
/// `told`: by the caller, in the machine's place.
Account account_of(const Problem& problem, const Machine& machine, const Candidate& candidate,
                   const MachineRates& told = {});
/// Bytes that a GPU's rank stores to, or loads from, the node's others in a launch of that work.
double link_bytes(const Problem& problem, const LaunchWork& work);

/// Warpgroups of a whole GPU outside the compute blocks, for an operator that is no product: those
/// that share or pull, and those that receive. Ring Attention's receivers share first.
struct AccountedGroups {
  std::uint32_t stream = 0;
  std::uint32_t receive = 0;
  // Candidate's. Those that stream have nothing to bring then.
  bool engines = false;
  std::uint32_t heads_together = 0;
};
/// `sms`: those that Ring Attention's take in all.
AccountedGroups accounted_groups(Op op, std::uint32_t nodes, std::uint32_t locals,
                                 std::uint32_t sms = 4);
/// On a GPU of its own, those that make a fused launch of `work` quickest. Each is taken from
/// computing, and brings keys, packs tokens or sums rows at a rate of its own. Ranks that share a
/// GPU have those of accounted_groups().
AccountedGroups chosen_groups(const Problem& problem, const Machine& machine,
                              const LaunchWork& work, const MachineRates& told = {});
/// The reason if copy engines cannot bring keys or tokens in a GPU's launches of such a problem
/// (kInvalidArgument).
Status check_row_engines(const Problem& problem);
/// What a fused launch with those groups runs as, which explain() prints and the operator's blocks
/// are: with Ring Attention's watchers among those that stream, and with what fills the last SM up.
Candidate accounted_candidate(const Problem& problem, const AccountedGroups& groups);
/// Warpgroups that only look for other ranks' keys, among those that stream.
constexpr std::uint32_t watchers_of(const Problem& problem) {
  return problem.op == Op::kRing && problem.ranks() > 1 ? problem.nodes : 0;
}

/// legal_candidates() of such a problem. On CPUs the plan's tiles, and chunks of several sizes. On
/// GPUs the plan's tiles and chunks, fused with several numbers of warpgroups, unfused with those
/// of chosen_groups().
std::vector<Candidate> accounted_candidates(const Problem& problem, const Machine& machine);

}  // namespace mk::kernels::plan
