/// \file
/// What MoE Dispatch and GEMM+Combine do on a GPU beside their products: the terms by which
/// account.h's legs are theirs. Host only; no state.
#pragma once

#include "kernels/plan/candidate.h"
#include "kernels/plan/machine.h"

namespace mk::kernels::plan {

/// Of one rank's launch of the problem's m, in us.
struct ExpertTerms {
  double before = 0;     ///< the routing plan or the index, which everything waits for
  double local = 0;      ///< tokens to the node's others, and packed; or product rows to theirs
  double passed = 0;     ///< tokens from other nodes to the node's others
  double sums = 0;       ///< of product rows; on one node by all warpgroups, product or not
  double last_sums = 0;  ///< of these, as a share, that nothing can be beside
  // Parts of local.
  double share = 0;     ///< this rank's tokens to the node's others
  double packed = 0;    ///< all rows of its experts
  double sum_gb_s = 0;  ///< of all that sum beside the product, read and written
};
ExpertTerms expert_terms(const Problem& problem, const Machine& machine,
                         const Candidate& candidate);

/// Bytes that a rank stores to the node's others: each token of its rail, or its product rows.
double expert_link_bytes(const Problem& problem);

}  // namespace mk::kernels::plan
