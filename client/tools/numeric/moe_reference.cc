#include "client/tools/numeric/moe_reference.h"

#include <algorithm>
#include <tuple>

#include "client/tools/numeric/gemm_reference.h"

namespace mk::tools {
namespace {

/// The ranks of a node come side by side, so many tokens of each at a time.
constexpr std::uint32_t kTokensAtATime = 256;

/// Steps from `from` forwards to `to` on a circle.
std::uint32_t steps(std::uint32_t from, std::uint32_t to, std::uint32_t circle) {
  return (to + circle - from) % circle;
}

}  // namespace

MoeReference::MoeReference(const MoeJobShape& shape, std::uint32_t rank,
                           std::span<const MoeSource> sources)
    : shape_(shape), sources_(sources) {
  const std::uint64_t world = std::uint64_t{shape.nodes} * shape.locals;
  first_expert_ = static_cast<std::uint32_t>(rank * std::uint64_t{shape.experts} / world);
  expert_count_ =
      static_cast<std::uint32_t>((rank + 1) * std::uint64_t{shape.experts} / world) - first_expert_;
  for (std::uint32_t source = 0; source < sources.size(); ++source) {
    for (std::uint32_t token = 0; token < sources[source].tokens; ++token) {
      for (std::uint32_t slot = 0; slot < shape.top_k; ++slot) {
        const std::uint64_t at = std::uint64_t{token} * shape.top_k + slot;
        const std::int32_t id = sources[source].ids[at];
        const auto expert = static_cast<std::uint32_t>(id);
        if (id < 0 || expert < first_expert_ || expert >= first_expert_ + expert_count_) continue;
        rows_.push_back({expert, source, token, slot, sources[source].weights[at]});
      }
    }
  }
  const auto key = [&](const Row& row) {
    const std::uint32_t locals = shape.locals;
    return std::tuple(row.expert, steps(row.rank / locals, rank / locals, shape.nodes),
                      row.token / kTokensAtATime, steps(rank % locals, row.rank % locals, locals),
                      row.token, row.slot);
  };
  std::sort(rows_.begin(), rows_.end(),
            [&](const Row& a, const Row& b) { return key(a) < key(b); });
}

std::uint64_t MoeReference::offset(std::uint32_t i) const {
  const auto first = std::find_if(rows_.begin(), rows_.end(),
                                  [&](const Row& row) { return row.expert >= first_expert_ + i; });
  return static_cast<std::uint64_t>(first - rows_.begin());
}

Comparison MoeReference::compare(std::uint32_t i, const std::uint16_t* weights,
                                 const std::uint16_t* y) const {
  const std::uint64_t first = offset(i);
  const std::uint64_t count = offset(i + 1) - first;
  const std::uint64_t hidden = shape_.hidden;
  std::vector<std::uint16_t> packed(count * hidden);
  for (std::uint64_t row = 0; row < count; ++row) {
    const Row& from = rows_[first + row];
    const std::uint16_t* token = sources_[from.rank].values.data() + from.token * hidden;
    std::copy(token, token + hidden, packed.data() + row * hidden);
  }
  GemmReference product(count, shape_.features, 1, 1, shape_.type);
  product.add_rank(packed.data(), weights, hidden, 1, 1);
  Comparison result = product.compare(y + first * shape_.features);
  if (result.wrong != 0) result.first_wrong += first * shape_.features;
  return result;
}

}  // namespace mk::tools
