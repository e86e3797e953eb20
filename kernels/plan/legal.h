/// \file
/// Which candidates an operator can run. The rules are the operators' own: their plans are made,
/// and kernels/cuda/host/role_blocks.h places warpgroups on SMs by the same rule. Host only.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/plan/candidate.h"
#include "kernels/plan/machine.h"

namespace mk::kernels::plan {

/// SMs of a device of `sms` for each of `ranks` ranks that share it. They leave one free: CUDA
/// copies between two places of one GPU by a kernel of its own, and such a copy, which brings what
/// the ranks wait for, must find room beside theirs.
constexpr std::uint32_t blocks_of_share(std::uint32_t sms, std::uint32_t ranks) {
  return ranks <= 1 ? sms : (sms > 0 ? sms - 1 : 0) / ranks;
}
/// SMs that a rank has.
std::uint32_t blocks_of_rank(const Problem& problem, const Machine& machine);
/// SMs that a candidate's warpgroups outside the compute blocks take, and the poller's.
std::uint32_t blocks_outside(const Problem& problem, const Candidate& candidate);

/// Fills in compute_blocks, unless they are named: SMs that the warpgroups outside leave of the
/// rank's share, at most kBlocksMax. kLimitExceeded: they leave none, or a role has more than
/// kBlocksMax.
Status place_warpgroups(const Problem& problem, const Machine& machine, Candidate& candidate);

/// The first reason why the operator would refuse `candidate`; ok: it runs. `candidate` has been
/// placed. kInvalidArgument, kLimitExceeded; kUnsupported of a problem that shall be
/// batch_invariant and cannot.
Status check_candidate(const Problem& problem, const Machine& machine, const Candidate& candidate);

/// The least payload of a command that legal_candidates() has over nodes: each costs the daemon's
/// thread some time besides its bytes, which smaller ones feel (two nodes of four H200s).
inline constexpr std::uint32_t kNetworkChunkBytesMin = 256 * 1024;

/// The exchanges of candidates: the named one, or each of the forms that the problem has.
std::vector<Exchange> exchanges_of(const Problem& problem);

/// All legal candidates of a grid over every dimension of Candidate, placed, in a fixed order that
/// depends on the world and the operator and hardly on the shape. What the problem names they all
/// have. Of what is chosen they leave the product half of the rank's SMs, and numbers of
/// warpgroups are among those that were measured.
std::vector<Candidate> legal_candidates(const Problem& problem, const Machine& machine);

}  // namespace mk::kernels::plan
