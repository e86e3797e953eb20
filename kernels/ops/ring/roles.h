/// \file
/// What the blocks of Ring Attention do, besides those of the gather (gather/roles.h). The executor
/// brings the arithmetic and the bulk copies:
///
///     void begin(const AttentionItem&);      a new item: no key seen yet
///     void resume(const AttentionItem&);     the item as it was put aside
///     void attend(const AttentionItem&, const AttentionKeys&, bool all, int64_t diagonal);
///                                            takes in a tile of keys: all of them, or, for query
///                                            row i, keys j <= i + diagonal
///     void put_aside(const AttentionItem&);  keeps the item's state, in fp32, for `resume`
///     void finish(const AttentionItem&);     stores the item's output, and its log-sum-exp if
///                                            wanted
///     and what gather/roles.h asks for
///
/// Keys by heads come in order, so that one number says of an origin how far its rows have come. An
/// executor whose compute blocks cannot look at flags has one block for each node that does it for
/// them:
///
///     void show_rows(origin, rows);    to this rank's compute blocks: so many rows are here
///     uint64_t rows_shown(origin);     what the last one showed in this launch; 0: nothing yet
///
///     role     does                                             waits for
///     share    this rank's K and V -> its node, its send blocks
///              (or lets engines do it: gather/engine_steps.h)
///     send     the K and V of its rail -> next node             what it sends
///     receive  arrived K and V -> its node                      arrivals
///     collect  sees K and V arrive, for compute                 each head of each origin
///     compute  items, pass after pass                           each tile of keys that it sees
///
/// Slots are read until compute is done. Nothing else of a launch outlives it: the output is
/// the caller's. An item belongs to one compute block. Its tiles of keys come in one order in
/// any block: every run gives the same bits, fused or not, with any number of blocks and
/// passes.
///
/// Each rank sees keys of every other one (causal: its first part those of the ranks before it, its
/// second part those of the ranks after it). So a rank that launched with another m is found out.
#pragma once

#include <cstdint>

#include "kernels/gather/roles.h"
#include "kernels/ops/ring/block.h"

namespace mk::kernels::ring_attention {

// Each role answers whether it ran to its end. If not, the launch has failed; its first cause is in
// LocalWords::failure.

/// One item over the steps of one pass.
template <class Executor>
MK_HOST_DEVICE inline bool compute_item(RingAttentionBlock<Executor>& block,
                                        const AttentionItem& item, std::uint32_t pass) {
  const RingAttentionSchedule schedule = block.schedule_of(item.sequence);
  if (pass >= schedule.passes() || !schedule.in_pass(item.query, pass)) return true;
  if (pass == 0) {
    block.executor.begin(item);
  } else {
    block.executor.resume(item);
  }
  const StepRange steps = schedule.pass_steps(pass);
  for (std::uint32_t step = steps.begin; step < steps.end; ++step) {
    KeyTile key = schedule.key_tile(step);
    const Sight sight = schedule.sight(item.query, key);
    if (sight == Sight::kNone) continue;
    key.tile.row += block.first_row(key.origin, item.sequence);
    if (!block.await_keys(key.origin, item.pair, key.tile.row, key.tile.rows)) return false;
    const std::uint64_t begin_ns = block.span_begin();
    block.executor.attend(item, block.keys(item, key), sight == Sight::kAll,
                          schedule.diagonal(item.query, key));
    block.span_end(begin_ns, SpanKind::kTile, item.number, step, key.origin);
  }
  if (pass == schedule.last_pass(item.query)) {
    block.executor.finish(item);
  } else {
    block.executor.put_aside(item);
  }
  return true;
}

/// Computes items `index`, `index` + compute blocks, ..., in each pass.
template <class Executor>
MK_HOST_DEVICE inline bool compute(RingAttentionBlock<Executor>& block) {
  if (block.launch.mode == Mode::kUnfused && !block.gather.await_all()) return false;
  for (std::uint32_t pass = 0; pass < block.passes(); ++pass) {
    for (std::uint32_t number = block.index; number < block.items();
         number += block.launch.blocks.compute) {
      if (block.stopped()) return false;
      if (!compute_item(block, block.item(number), pass)) return false;
    }
  }
  block.publish_done(block.launch.blocks.compute);
  return true;
}

/// The collect role, by heads: of the ranks of the node from which rows come over `index` hops
/// (0: this node's), in the order in which compute wants them.
template <class Executor>
MK_HOST_DEVICE inline bool watch(RingAttentionBlock<Executor>& block) {
  const std::uint32_t locals = block.world.locals;
  const std::uint32_t together = block.launch.plan.heads_together;
  for (std::uint32_t pair = 0; pair < block.launch.plan.head_pairs(); pair += together) {
    for (std::uint32_t local = 0; local < locals; ++local) {
      const std::uint32_t origin = block.schedule.gather().origin_at(block.index * locals + local);
      if (origin != block.world.rank() && !block.watch_pair(origin, pair)) return false;
    }
  }
  return true;
}

/// `source`: the launch's KeySource, or what else has its copy_packed of the same rows.
template <class Executor, class Source>
MK_HOST_DEVICE inline bool share(RingAttentionBlock<Executor>& block, const Source& source,
                                 bool by_dma) {
  return gather::share(block.gather, source, /*in_turn=*/false, {.by_dma = by_dma});
}
template <class Executor>
MK_HOST_DEVICE inline bool share(RingAttentionBlock<Executor>& block) {
  return share(block, block.launch.keys_values, block.launch.by_dma);
}
template <class Executor>
MK_HOST_DEVICE inline bool send(RingAttentionBlock<Executor>& block) {
  return gather::send(block.gather, [&block] {
    return block.await_blocks(Role::kCompute, block.launch.blocks.compute, kGatherHopsMax + 1);
  });
}
template <class Executor>
MK_HOST_DEVICE inline bool receive(RingAttentionBlock<Executor>& block) {
  return gather::receive(block.gather);
}

}  // namespace mk::kernels::ring_attention
