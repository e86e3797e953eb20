/// \file
/// In which order a rank of one node sums its tokens: those first whose rows are computed first.
/// Most tokens wait for a tile near the end, since any of their slots' experts may be among the
/// last. A block that takes tokens by number soon waits for one of those, while others are
/// complete. The order changes no result: a token's rows are added in slot order.
///
/// Like the rest of the index it is made in pieces, by several lanes. It is the same however many
/// they are.
#pragma once

#include <cstdint>

#include "kernels/ops/combine/block.h"

namespace mk::kernels::gemm_combine {

/// Calls visit(part, tokens) for this block's and lane's parts of `tokens` tokens.
template <class Executor, class Lanes, class Visit>
MK_HOST_DEVICE inline void for_own_parts(const CombineBlock<Executor>& block, const Lanes& lanes,
                                         std::uint32_t tokens, Visit&& visit) {
  const std::uint32_t parts = CombineSchedule::parts_of(tokens);
  const std::uint32_t step = block.launch.blocks.plan * lanes.count;
  for (std::uint32_t part = block.index * lanes.count + lanes.index; part < parts; part += step)
    visit(part, CombineSchedule::tokens_of(part, tokens));
}

/// Numbers of tokens, by lateness. A token has lateness l if a part in (2^-(l+1), 2^-l] of the
/// tiles is left when its last one is begun; the greatest one is of all smaller parts.
class LatenessSums {
 public:
  /// Those of parts [begin, end).
  template <class Executor>
  MK_HOST_DEVICE void add(const CombineBlock<Executor>& block, std::uint32_t begin,
                          std::uint32_t end) {
    // Four sums of 16 bits in a word, for so many parts at a time that none overflows.
    constexpr std::uint32_t kAtOnce = 0xffff / CombineSchedule::kPartTokensMax;
    constexpr std::uint64_t kEven = 0x00ff00ff00ff00ff;
    while (begin < end) {
      const std::uint32_t until = end - begin < kAtOnce ? end : begin + kAtOnce;
      std::uint64_t even = 0;
      std::uint64_t odd = 0;
      for (; begin < until; ++begin) {
        const std::uint64_t late = block.counts(block.world.node, begin)->late;
        even += late & kEven;
        odd += late >> 8 & kEven;
      }
      for (std::uint32_t l = 0; l < kLatenesses; ++l)
        sums_[l] += (l % 2 == 0 ? even : odd) >> (l / 2 * 16) & 0xffff;
    }
  }
  MK_HOST_DEVICE std::uint32_t& operator[](std::uint32_t lateness) { return sums_[lateness]; }

 private:
  std::uint32_t sums_[kLatenesses] = {};
};

/// The lateness of this rank's token, when all local ranks' entries are here.
template <class Executor>
MK_HOST_DEVICE inline std::uint32_t lateness_of(const CombineBlock<Executor>& block,
                                                std::uint32_t token) {
  const CombineGeometry& plan = block.launch.plan;
  // Over several nodes it waits for them; in several steps tiles do not go by their numbers.
  if (plan.nodes > 1 || plan.steps > 1) return 0;
  std::uint32_t latest = 0;
  const CombineEntry* const entries = block.entry(block.world.local, block.world.node, token, 0);
  for (std::uint32_t slot = 0; slot < plan.shape.top_k; ++slot) {
    const CombineEntry entry = entries[slot];
    if (entry.epoch != block.epoch) continue;
    const std::uint32_t local = entry.flag / plan.tiles_max;
    const std::uint32_t tiles = block.words_of(local)->tiles;
    const std::uint32_t left = tiles - (entry.flag - local * plan.tiles_max);
    while (latest + 1 < kLatenesses && left <= tiles >> (latest + 1)) ++latest;
  }
  return latest;
}

/// The block's parts of this rank's tokens, counted.
template <class Executor, class Lanes>
MK_HOST_DEVICE inline void count_lateness(const CombineBlock<Executor>& block, const Lanes& lanes) {
  for_own_parts(block, lanes, block.launch.routing.tokens,
                [&](std::uint32_t part, const TileRange& tokens) {
                  std::uint64_t late = 0;
                  for (std::uint32_t token = tokens.begin; token < tokens.end; ++token)
                    late += std::uint64_t{1} << (8 * lateness_of(block, token));
                  block.counts(block.world.node, part)->late = late;
                });
}

/// When all have counted: the parts' tokens to their places in the order.
template <class Executor, class Lanes>
MK_HOST_DEVICE inline void order_tokens(const CombineBlock<Executor>& block, const Lanes& lanes) {
  const std::uint32_t parts = CombineSchedule::parts_of(block.launch.routing.tokens);
  std::uint32_t* const order = block.list(block.world.node);
  for_own_parts(block, lanes, block.launch.routing.tokens,
                [&](std::uint32_t part, const TileRange& tokens) {
                  LatenessSums next;  // at first: how many in the parts before
                  next.add(block, 0, part);
                  LatenessSums after;
                  after.add(block, part, parts);
                  std::uint32_t earlier = 0;
                  for (std::uint32_t l = 0; l < kLatenesses; ++l) {
                    const std::uint32_t all = next[l] + after[l];
                    next[l] += earlier;
                    earlier += all;
                  }
                  for (std::uint32_t token = tokens.begin; token < tokens.end; ++token)
                    order[next[lateness_of(block, token)]++] = token;
                });
}

}  // namespace mk::kernels::gemm_combine
