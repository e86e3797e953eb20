/// \file
/// Routing of a whole job, as the tests draw it: every kind of skew there is.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "kernels/ops/moe/routing_plan.h"

namespace mk::kernels::testing {

/// How tokens choose their experts.
enum class Skew {
  kUniform,    ///< k different experts, all alike
  kOneExpert,  ///< all tokens to one expert, in their first slot; the rest dropped
  kOneRank,    ///< only experts of one rank
  kNone,       ///< every slot dropped
  kSparse,     ///< most slots dropped
  kRepeated,   ///< a token may name an expert twice
};
inline constexpr Skew kSkews[] = {Skew::kUniform, Skew::kOneExpert, Skew::kOneRank,
                                  Skew::kNone,    Skew::kSparse,    Skew::kRepeated};

/// One rank's tokens, ids and weights dense as a caller gives them.
struct RankRouting {
  std::uint32_t tokens = 0;
  std::vector<std::int32_t> ids;
  std::vector<float> weights;

  RoutingTable table(std::uint32_t top_k) const {
    return {tokens, top_k, ids.data(), weights.data()};
  }
};

/// The routing of every rank. With `uneven` the numbers of tokens differ, and some ranks have none.
inline std::vector<RankRouting> draw_routing(std::uint32_t ranks, std::uint32_t experts,
                                             std::uint32_t top_k, std::uint32_t tokens_max,
                                             Skew skew, bool uneven, std::mt19937_64& random) {
  const auto below = [&](std::uint32_t end) { return static_cast<std::uint32_t>(random() % end); };
  std::vector<RankRouting> all(ranks);
  std::uint32_t lucky_rank = below(ranks);
  while (shard_of(experts, ranks, lucky_rank).count == 0) lucky_rank = (lucky_rank + 1) % ranks;
  const ShardRange lucky = shard_of(experts, ranks, lucky_rank);
  const auto lucky_expert = static_cast<std::int32_t>(lucky.first);
  for (RankRouting& one : all) {
    one.tokens = uneven ? (below(4) == 0 ? 0 : below(tokens_max + 1)) : tokens_max;
    for (std::uint32_t token = 0; token < one.tokens; ++token) {
      std::vector<std::int32_t> left(experts);
      for (std::uint32_t e = 0; e < experts; ++e) left[e] = static_cast<std::int32_t>(e);
      for (std::uint32_t slot = 0; slot < top_k; ++slot) {
        const std::uint32_t pick = below(static_cast<std::uint32_t>(left.size()));
        std::int32_t id = left[pick];
        switch (skew) {
          case Skew::kUniform:
            left.erase(left.begin() + pick);
            break;
          case Skew::kOneExpert:
            id = slot == 0 ? lucky_expert : -1;
            break;
          case Skew::kOneRank:
            id = lucky_expert + static_cast<std::int32_t>(below(lucky.count));
            break;
          case Skew::kNone:
            id = -1;
            break;
          case Skew::kSparse:
            if (below(5) != 0) id = -1;
            break;
          case Skew::kRepeated:
            break;
        }
        one.ids.push_back(id);
        one.weights.push_back(static_cast<float>(below(1000)) * 1e-3f);
      }
    }
  }
  return all;
}

}  // namespace mk::kernels::testing
