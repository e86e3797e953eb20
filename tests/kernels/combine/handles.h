/// \file
/// What MoE Dispatch+GEMM leaves on a rank, made from the routing of a whole job by the
/// definition alone: every (rank, token, slot) whose expert is here, grouped by expert.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "kernels/ops/moe/routing_plan.h"
#include "tests/kernels/moe/routing_cases.h"

namespace mk::kernels::testing {

struct Handle {
  std::vector<MoeRow> rows;
  std::vector<std::uint32_t> offsets;
};

/// Of `rank`. Within an expert the rows stand in any order: nothing may depend on it.
inline Handle draw_handle(const std::vector<RankRouting>& all, std::uint32_t experts,
                          std::uint32_t top_k, std::uint32_t rank, std::mt19937_64& random) {
  const ShardRange here = shard_of(experts, static_cast<std::uint32_t>(all.size()), rank);
  Handle handle;
  handle.offsets.push_back(0);
  for (std::uint32_t expert = here.first; expert < here.first + here.count; ++expert) {
    for (std::uint32_t source = 0; source < all.size(); ++source) {
      for (std::uint32_t i = 0; i < all[source].ids.size(); ++i) {
        if (all[source].ids[i] != static_cast<std::int32_t>(expert)) continue;
        handle.rows.push_back({source, i / top_k, i % top_k, all[source].weights[i]});
      }
    }
    std::shuffle(handle.rows.begin() + handle.offsets.back(), handle.rows.end(), random);
    handle.offsets.push_back(static_cast<std::uint32_t>(handle.rows.size()));
  }
  return handle;
}

}  // namespace mk::kernels::testing
