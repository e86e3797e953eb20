/// \file
/// The rows of a node's experts where every token draws its experts, all alike. Chance decides how
/// many an expert has and where another node's begin. By these tiles are cut, and some rank ends
/// last: so the order of tokens and sums goes by drawn rows. Host only.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/plan/candidate.h"

namespace mk::kernels::plan {

/// A row of an expert.
struct DrawnRow {
  std::uint32_t hops = 0;    ///< from its token's node to here
  std::uint32_t source = 0;  ///< its token's local rank
  std::uint32_t token = 0;   ///< of that rank
};

class DrawnRows {
 public:
  /// One node's tokens are drawn. The others' are alike: for each that goes d nodes on from here,
  /// one comes from d nodes before. Equal seeds give equal rows.
  DrawnRows(const Problem& problem, std::uint64_t seed);

  using OfExpert = std::vector<DrawnRow>;
  /// By expert, in the order in which RoutingPlan has them.
  const std::vector<OfExpert>& of_rank(std::uint32_t local) const { return ranks_[local]; }

 private:
  std::vector<std::vector<OfExpert>> ranks_;
};

/// A prediction is the mean of launches with these draws.
std::vector<std::uint64_t> seeds_of_draws(const Problem& problem);

}  // namespace mk::kernels::plan
