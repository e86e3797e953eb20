#include "tests/sim/operators/routing.h"

#include <algorithm>
#include <random>

#include "kernels/comm/shard.h"
#include "kernels/ops/combine/row_index.h"

namespace mk::sim {

JobRouting::JobRouting(const RoutingShapeOfJob& shape, std::uint64_t seed) : shape_(shape) {
  std::mt19937_64 random(seed);
  std::vector<std::int32_t> chosen;
  for (std::uint32_t i = 0; i < shape.locals * shape.tokens; ++i) {
    chosen.clear();
    while (chosen.size() < shape.top_k) {
      const auto id = static_cast<std::int32_t>(random() % shape.experts);
      if (std::find(chosen.begin(), chosen.end(), id) == chosen.end()) chosen.push_back(id);
    }
    base_.insert(base_.end(), chosen.begin(), chosen.end());
  }
}

JobRouting::Table JobRouting::table(std::uint32_t rank) const {
  Table table;
  for (std::uint32_t token = 0; token < shape_.tokens; ++token) {
    for (std::uint32_t slot = 0; slot < shape_.top_k; ++slot)
      table.ids.push_back(id(rank, token, slot));
  }
  table.weights.assign(table.ids.size(), 1.0f);
  return table;
}

JobRouting::Handle JobRouting::handle(std::uint32_t rank) const {
  const std::uint32_t ranks = shape_.nodes * shape_.locals;
  const kernels::ShardRange here = kernels::shard_of(shape_.experts, ranks, rank);
  std::vector<std::vector<kernels::MoeRow>> by_expert(here.count);
  // In the order in which they are to be expected: this node's, then those of the nodes before it;
  // of each node part by part, its ranks side by side.
  constexpr std::uint32_t kPart = kernels::RoutingShape::kPartTokens;
  const std::uint32_t parts = kernels::div_up(shape_.tokens, kPart);
  for (std::uint32_t step = 0; step < ranks * parts; ++step) {
    const std::uint32_t hops = step / (shape_.locals * parts);
    const std::uint32_t part = step / shape_.locals % parts;
    const std::uint32_t node = (rank / shape_.locals + shape_.nodes - hops) % shape_.nodes;
    const std::uint32_t source =
        node * shape_.locals + (rank % shape_.locals + step % shape_.locals) % shape_.locals;
    const std::uint32_t end = std::min(shape_.tokens, (part + 1) * kPart);
    for (std::uint32_t token = part * kPart; token < end; ++token) {
      for (std::uint32_t slot = 0; slot < shape_.top_k; ++slot) {
        const auto expert = static_cast<std::uint32_t>(id(source, token, slot)) - here.first;
        if (expert < here.count) by_expert[expert].push_back({source, token, slot, 1.0f});
      }
    }
  }
  Handle handle;
  for (const auto& rows : by_expert) {
    handle.offsets.push_back(static_cast<std::uint32_t>(handle.rows.size()));
    handle.rows.insert(handle.rows.end(), rows.begin(), rows.end());
  }
  handle.offsets.push_back(static_cast<std::uint32_t>(handle.rows.size()));
  return handle;
}

double JobRouting::imbalance(std::uint32_t ranks) const {
  const std::uint32_t all = shape_.nodes * shape_.locals;
  std::vector<std::uint64_t> rows(all);
  for (std::uint32_t source = 0; source < all; ++source) {
    for (std::uint32_t token = 0; token < shape_.tokens; ++token) {
      for (std::uint32_t slot = 0; slot < shape_.top_k; ++slot)
        ++rows[kernels::rank_of_expert(static_cast<std::uint32_t>(id(source, token, slot)),
                                       shape_.experts, all)];
    }
  }
  const auto most = *std::max_element(rows.begin(), rows.begin() + ranks);
  return static_cast<double>(most) / (double{1} * shape_.tokens * shape_.top_k);
}

}  // namespace mk::sim
