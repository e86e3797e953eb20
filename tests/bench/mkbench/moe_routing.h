/// \file
/// The routing of the MoE cases: which experts a token has, and with which weights. Any rank can
/// draw any rank's.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "client/tools/numeric/moe_reference.h"
#include "client/tools/numeric/random_matrix.h"
#include "tests/bench/mkbench/spec.h"

namespace mk::bench {

struct MoeRouting {
  std::uint64_t tokens = 0;  ///< of a rank, at most
  std::uint32_t experts = 0;
  std::uint32_t top_k = 0;
  bool hot = false;  ///< expert 0 is always the first; one in sixteen of the others is nowhere
};

/// A token's experts: all different, each as likely as any other.
inline void route(const MoeRouting& routing, std::uint64_t key, std::int32_t* ids) {
  std::uint64_t state = key;
  const auto draw = [&](std::uint64_t below) { return (state = tools::mix64(state)) % below; };
  for (std::uint32_t slot = 0; slot < routing.top_k; ++slot) {
    if (routing.hot && slot == 0) {
      ids[slot] = 0;
      continue;
    }
    do {
      ids[slot] = static_cast<std::int32_t>(draw(routing.experts));
    } while (std::find(ids, ids + slot, ids[slot]) != ids + slot);
  }
  for (std::uint32_t slot = 1; routing.hot && slot < routing.top_k; ++slot) {
    if (draw(16) == 0) ids[slot] = -1;
  }
}

/// How many tokens `rank` has in that launch, where they go and with which weights; their values
/// are left empty. With varying sizes ranks differ, and a rank may have none.
inline void draw_routing(const BenchSpec& spec, const MoeRouting& routing, std::uint32_t launch,
                         std::uint32_t rank, tools::MoeSource* source) {
  source->tokens = extent_of(spec, launch + rank, 0, routing.tokens);
  source->ids.resize(source->tokens * routing.top_k);
  source->weights.resize(source->ids.size());
  source->values.clear();
  const std::uint64_t key =
      tools::mix64(spec.seed ^ tools::mix64(std::uint64_t{launch} << 32 | (rank + 1)));
  for (std::uint64_t token = 0; token < source->tokens; ++token)
    route(routing, tools::mix64(key + token), source->ids.data() + token * routing.top_k);
  for (std::size_t i = 0; i < source->weights.size(); ++i)
    source->weights[i] = static_cast<float>(tools::mix64(key ^ i) >> 40) / (1 << 24);
}

}  // namespace mk::bench
