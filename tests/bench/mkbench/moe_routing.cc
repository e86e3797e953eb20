#include "tests/bench/mkbench/moe_routing.h"

#include <algorithm>
#include <numeric>

#include "client/tools/numeric/random_matrix.h"
#include "tests/bench/mkbench/inputs.h"

namespace mk::bench {

namespace {
constexpr std::uint64_t kDocument = 256;  ///< tokens
}  // namespace

const std::vector<std::string>& MoeRouting::names() {
  static const std::vector<std::string> all{"uniform", "zipf", "hot", "hot-rank", "correlated"};
  return all;
}

MoeRouting::MoeRouting(std::string_view name, std::uint64_t tokens, std::uint32_t experts,
                       std::uint32_t top_k, std::uint32_t ranks, std::uint64_t seed)
    : kind_(static_cast<Kind>(std::find(names().begin(), names().end(), name) - names().begin())),
      tokens_(tokens),
      experts_(experts),
      top_k_(top_k),
      experts_of_rank_0_(static_cast<std::uint32_t>(share_of(experts, ranks, 0).count)) {
  if (kind_ != Kind::kZipf) return;
  order_.resize(experts);
  std::iota(order_.begin(), order_.end(), 0u);
  for (std::uint32_t i = experts; i > 1; --i)
    std::swap(order_[i - 1], order_[tools::mix64(seed + i) % i]);
  double sum = 0;
  for (std::uint32_t i = 0; i < experts; ++i) likely_up_to_.push_back(sum += 1.0 / (i + 1));
}

std::uint32_t MoeRouting::draw_expert(std::uint64_t random) const {
  if (kind_ != Kind::kZipf) return static_cast<std::uint32_t>(random % experts_);
  const double at = static_cast<double>(random >> 11) * 0x1p-53 * likely_up_to_.back();
  const auto found = std::upper_bound(likely_up_to_.begin(), likely_up_to_.end() - 1, at);
  return order_[static_cast<std::size_t>(found - likely_up_to_.begin())];
}

void MoeRouting::route(std::uint64_t key, std::uint64_t document, std::int32_t* ids) const {
  std::uint64_t state = key;
  const auto draw = [&] { return state = tools::mix64(state); };
  const std::uint32_t hot = std::min(std::max(top_k_ / 2, 1u), experts_of_rank_0_);
  for (std::uint32_t slot = 0; slot < top_k_; ++slot) {
    do {
      std::uint32_t expert = draw_expert(draw());
      if (kind_ == Kind::kHot && slot == 0) expert = 0;
      if (kind_ == Kind::kHotRank && slot < hot) expert %= experts_of_rank_0_;
      if (kind_ == Kind::kCorrelated && draw() % 4 != 0)
        expert =
            static_cast<std::uint32_t>(tools::mix64(document + draw() % (2 * top_k_)) % experts_);
      ids[slot] = static_cast<std::int32_t>(expert);
    } while (std::find(ids, ids + slot, ids[slot]) != ids + slot);
  }
  for (std::uint32_t slot = 1; kind_ == Kind::kHot && slot < top_k_; ++slot) {
    if (draw() % 16 == 0) ids[slot] = -1;
  }
}

void MoeRouting::draw(const BenchSpec& spec, std::uint32_t launch, std::uint32_t rank,
                      tools::MoeSource* source) const {
  source->tokens = extent_of(spec, launch + rank, 0, tokens_);
  source->ids.resize(source->tokens * top_k_);
  source->weights.resize(source->ids.size());
  source->values.clear();
  const std::uint64_t key =
      tools::mix64(spec.seed ^ tools::mix64(std::uint64_t{launch} << 32 | (rank + 1)));
  for (std::uint64_t token = 0; token < source->tokens; ++token) {
    route(tools::mix64(key + token), tools::mix64(key ^ ~(token / kDocument)),
          source->ids.data() + token * top_k_);
  }
  for (std::size_t i = 0; i < source->weights.size(); ++i)
    source->weights[i] = static_cast<float>(tools::mix64(key ^ i) >> 40) / (1 << 24);
}

}  // namespace mk::bench
