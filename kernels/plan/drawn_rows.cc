#include "kernels/plan/drawn_rows.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <utility>

#include "kernels/comm/shard.h"
#include "kernels/ops/combine/row_index.h"
#include "kernels/ops/moe/routing_shape.h"
#include "kernels/plan/operator_work.h"

namespace mk::kernels::plan {

DrawnRows::DrawnRows(const Problem& problem, std::uint64_t seed) : ranks_(problem.locals) {
  const std::uint32_t ranks = problem.ranks();
  const std::uint32_t experts = std::max(1u, problem.experts.count);
  const std::uint32_t tokens = tokens_of_rank(problem);
  for (auto& rank : ranks_) rank.resize(shard_rows_max(experts, ranks));
  std::mt19937_64 random(seed);
  std::vector<std::uint32_t> order(experts);  // the first ones of a shuffle are a token's
  std::iota(order.begin(), order.end(), 0);
  const auto draw = [&](std::uint32_t source, std::uint32_t token) {
    for (std::uint32_t slot = 0; slot < std::min(problem.experts.top_k, experts); ++slot) {
      std::swap(order[slot], order[slot + random() % (experts - slot)]);
      const std::uint32_t rank = rank_of_expert(order[slot], experts, ranks);
      const std::uint32_t first = shard_of(experts, ranks, rank).first;
      ranks_[rank % problem.locals][order[slot] - first].push_back(
          {rank / problem.locals, source, token});
    }
  };
  constexpr std::uint32_t kPart = RoutingShape::kPartTokens;
  for (std::uint32_t part = 0; part < tokens; part += kPart) {
    for (std::uint32_t source = 0; source < problem.locals; ++source) {
      for (std::uint32_t token = part; token < std::min(tokens, part + kPart); ++token)
        draw(source, token);
    }
  }
  for (auto& rank : ranks_) {
    for (OfExpert& rows : rank)
      std::ranges::stable_sort(rows, {}, [](const DrawnRow& row) { return row.hops; });
  }
}

std::vector<std::uint64_t> seeds_of_draws(const Problem& problem) {
  // One draw of many rows is as good as several.
  constexpr std::uint64_t kDrawsMax = 32;
  constexpr std::uint64_t kRowsEnough = 1 << 19;
  const std::uint64_t rows =
      std::uint64_t{problem.locals} * tokens_of_rank(problem) * problem.experts.top_k;
  std::vector<std::uint64_t> seeds(
      std::clamp<std::uint64_t>(kRowsEnough / std::max<std::uint64_t>(rows, 1), 1, kDrawsMax));
  std::iota(seeds.begin(), seeds.end(), 1000);
  return seeds;
}

}  // namespace mk::kernels::plan
