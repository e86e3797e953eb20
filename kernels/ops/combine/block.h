/// \file
/// A block of GEMM+Combine: where its arrays, rows and sums lie, and what its flags mean. The
/// roles themselves, and what waits for what, are in protocol.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/comm/operator_block.h"
#include "kernels/ops/combine/launch.h"
#include "kernels/ops/combine/schedule.h"

namespace mk::kernels {

/// Some of the tokens that this rank sums for the rank of its rail on `node`, which may be its own.
/// It is [begin, end) of the list of those that have rows here, or of its own tokens in their
/// order.
struct CombineRun {
  std::uint32_t node = 0;
  std::uint32_t begin = 0;
  std::uint32_t end = 0;
};

/// One token's sum, as a role asks its executor for it. What is added up comes with it.
struct CombineSum {
  std::byte* target = nullptr;  ///< in staging; null: the caller's output
  std::uint32_t token = 0;      ///< of the output
};

template <class Executor>
class CombineBlock : public OperatorBlock<Executor> {
  using Base = OperatorBlock<Executor>;

 public:
  using Base::at;
  using Base::await;
  using Base::await_blocks;
  using Base::bank;
  using Base::control;
  using Base::epoch;
  using Base::executor;
  using Base::index;
  using Base::publish;
  using Base::publish_within_rank;
  using Base::rank_of;
  using Base::site;
  using Base::totals;
  using Base::word;
  using Base::world;

  MK_HOST_DEVICE CombineBlock(Executor& executor_in, const CombineLaunch& launch_in, Role role_in,
                              std::uint32_t index_in, BlockTotals& totals_in)
      : Base(executor_in, launch_in, role_in, index_in, totals_in),
        launch(launch_in),
        schedule(launch_in.plan, launch_in.context.world),
        rows(launch_in.plan, launch_in.context.world, launch_in.rows, launch_in.offsets,
             launch_in.room),
        words(reinterpret_cast<CombineWords*>(at(launch_in.plan.layout.words))) {}

  const CombineLaunch& launch;
  const CombineSchedule schedule;
  const RowIndex rows;
  CombineWords* const words;

  // --- Places, in this rank's workspace where no other is named ---

  MK_HOST_DEVICE CombineTile* tiles() const {
    return reinterpret_cast<CombineTile*>(at(launch.plan.layout.tiles));
  }
  /// Local rank `local` tells its tiles there when its index is made.
  MK_HOST_DEVICE const CombineWords* words_of(std::uint32_t local) const {
    return reinterpret_cast<const CombineWords*>(at(local, launch.plan.layout.words));
  }
  MK_HOST_DEVICE std::uint32_t* order() const { return word(at(launch.plan.layout.order)); }
  MK_HOST_DEVICE CombineNote* block_note(std::uint32_t block, std::uint32_t rank) const {
    return reinterpret_cast<CombineNote*>(at(schedule.block_note(block, rank)));
  }
  /// The note that local rank `from` wrote for the owner `to`, about tokens of the rail peer on
  /// `node`.
  MK_HOST_DEVICE CombineNote* note(std::uint32_t to, std::uint32_t from, std::uint32_t node) const {
    return reinterpret_cast<CombineNote*>(at(to, schedule.note(from, node)));
  }
  MK_HOST_DEVICE CombineEntry* entry(std::uint32_t local, std::uint32_t node, std::uint32_t token,
                                     std::uint32_t slot) const {
    return reinterpret_cast<CombineEntry*>(at(local, schedule.entry(node, token, slot)));
  }
  /// Of the rail peer on `node`: what it gets, and which of this rank's tokens it has sums of.
  MK_HOST_DEVICE CombinePeer* peer(std::uint32_t node) const {
    return reinterpret_cast<CombinePeer*>(at(schedule.peer(node)));
  }
  /// Tokens of the rail peer on `node` that have rows here; of its own node: all its own, in the
  /// order in which they are summed (lateness.h).
  MK_HOST_DEVICE std::uint32_t* list(std::uint32_t node) const {
    return word(at(schedule.list(node)));
  }
  MK_HOST_DEVICE std::uint32_t* places(std::uint32_t node) const {
    return word(at(schedule.place(node)));
  }
  /// By rank, as far as plan block `block` has looked; kBlocksMax: of all ids.
  MK_HOST_DEVICE std::uint64_t* expected(std::uint32_t block = kBlocksMax) const {
    return reinterpret_cast<std::uint64_t*>(at(schedule.expected(block)));
  }
  MK_HOST_DEVICE CombineCounts* counts(std::uint32_t node, std::uint32_t part) const {
    return reinterpret_cast<CombineCounts*>(at(schedule.counts(node, part)));
  }
  MK_HOST_DEVICE std::uint32_t* order_counts() const {
    return word(at(launch.plan.layout.order_counts));
  }
  /// Where a product row of this rank goes: its slot at its token's owner on this node.
  MK_HOST_DEVICE std::byte* slot_of(const MoeRow& row) const {
    return at(row.rank % world.locals, schedule.slot(row.rank / world.locals, row.token, row.slot));
  }
  MK_HOST_DEVICE std::byte* staging(std::uint32_t node) const {
    return at(schedule.staging_bank(bank, world.node, node));
  }
  MK_HOST_DEVICE const std::byte* received(std::uint32_t node) const {
    return at(schedule.receive_bank(bank, world.node, node));
  }

  /// The handle is that of a Dispatch+GEMM that has made rows, and not of one that had no room
  /// for them, or was refused.
  MK_HOST_DEVICE bool complete() const {
    return launch.complete && launch.offsets[rows.experts().count] <= launch.room;
  }

  // --- Runs of tokens ---

  /// Those whose sums come here.
  MK_HOST_DEVICE bool is_own(const CombineRun& run) const { return run.node == world.node; }
  MK_HOST_DEVICE std::uint32_t token_of(const CombineRun& run, std::uint32_t i) const {
    return list(run.node)[i];
  }
  MK_HOST_DEVICE CombineSum sum_of(const CombineRun& run, std::uint32_t i) const {
    return {is_own(run) ? nullptr : staging(run.node) + schedule.sum_in_bank(i), token_of(run, i)};
  }
  /// What each token of the run may wait for: a row in each of its slots, and, if it is this
  /// rank's, a sum from each other node.
  MK_HOST_DEVICE std::uint32_t awaited_each(const CombineRun& run) const {
    return launch.plan.shape.top_k + (is_own(run) ? world.nodes - 1 : 0);
  }
  MK_HOST_DEVICE std::uint32_t awaited(const CombineRun& run) const {
    return (run.end - run.begin) * awaited_each(run);
  }
  /// The flag of the `which`-th of these, or null: it waits for none. And, for a message, the wait.
  MK_HOST_DEVICE const std::uint32_t* awaited_flag(const CombineRun& run,
                                                   std::uint32_t which) const {
    const Awaited what = awaited_at(run, which);
    if (what.slot < launch.plan.shape.top_k) {
      const CombineEntry& found = *entry(world.local, run.node, what.token, what.slot);
      return found.epoch == epoch ? word(at(schedule.tile_ready(found.flag))) : nullptr;
    }
    const std::uint32_t place = places(what.node)[what.token];
    if (place == 0) return nullptr;
    return this->common.context.arrival_flags +
           schedule.flags().arrival(bank, world.node, what.node, schedule.chunk_of(place - 1));
  }
  MK_HOST_DEVICE WaitSite awaited_site(const CombineRun& run, std::uint32_t which) const {
    const Awaited what = awaited_at(run, which);
    if (what.slot < launch.plan.shape.top_k)
      return tile_site(entry(world.local, run.node, what.token, what.slot)->flag);
    const std::uint32_t place = places(what.node)[what.token];
    return this->arrival_site(what.node, schedule.chunk_of(place - 1));
  }

  // --- Headers ---

  /// The header of what goes to that node.
  MK_HOST_DEVICE void write_header(std::uint32_t node) const {
    auto* header = reinterpret_cast<CombineHeader*>(staging(node));
    header->epoch = epoch;
    header->tokens = peer(node)->tokens;
    auto* checks = reinterpret_cast<std::uint64_t*>(header + 1);
    for (std::uint32_t local = 0; local < world.locals; ++local)
      checks[local] = note(world.local, local, node)->check;
  }
  /// How many sums come from that node, whose header is here. Nothing a rank says may lead beyond a
  /// bank.
  MK_HOST_DEVICE std::uint32_t tokens_from(std::uint32_t node) const {
    const std::uint32_t said = reinterpret_cast<const CombineHeader*>(received(node))->tokens;
    const std::uint32_t most = launch.plan.shape.tokens_max;
    return said < most ? said : most;
  }
  /// What that rank says of its rows for this rank's tokens; its header or its note is here.
  MK_HOST_DEVICE std::uint64_t check_of(std::uint32_t node, std::uint32_t local) const {
    if (node == world.node) return note(world.local, local, node)->check;
    const auto* header = reinterpret_cast<const CombineHeader*>(received(node));
    return reinterpret_cast<const std::uint64_t*>(header + 1)[local];
  }

  /// By one block.
  MK_HOST_DEVICE void note_verdict(const CombineVerdict& verdict) const {
    words->verdict = verdict;
    if (verdict.bad_rank == 0 || launch.refusals == nullptr) return;
    CombineRefusals& refusals = *launch.refusals;
    const CombineFault& fault = words->fault;
    refusals.epoch = epoch;
    refusals.verdict = verdict;
    refusals.fault = fault;
    refusals.rows = launch.offsets[rows.experts().count];
    if (fault.row != CombineFault::kNone) refusals.row = rows.row(fault.row);
    if (fault.in_ids()) {
      const std::uint32_t token = fault.slot / launch.plan.shape.top_k;
      const std::uint32_t slot = fault.slot - token * launch.plan.shape.top_k;
      refusals.id = launch.routing.ids[std::uint64_t{token} * launch.routing.stride + slot];
    }
    shm::store_release(&refusals.count, shm::load_relaxed(&refusals.count) + 1);
  }

  // --- Shown by this block ---

  MK_HOST_DEVICE void publish_counted() { publish_within_rank(&words->counted[index]); }
  MK_HOST_DEVICE void publish_listed() { publish_within_rank(&words->listed[index]); }
  /// This rank's entries and notes are with the local ranks, and its tiles are in order.
  MK_HOST_DEVICE void publish_indexed() {
    this->publish_at_every_local(schedule.indexed(world.local));
  }
  /// The tile's product rows are in their slots.
  MK_HOST_DEVICE void publish_tile(std::uint32_t tile) {
    this->publish_at_every_local(schedule.tile_ready(schedule.tile_flag(world.local, tile)));
  }
  MK_HOST_DEVICE void publish_chunk(std::uint32_t node, std::uint32_t chunk) {
    publish_within_rank(word(at(schedule.chunk_reduced(node, chunk))));
  }

  // --- Awaited by this block; false: the launch has failed ---

  /// In unfused mode: this rank's product is done.
  MK_HOST_DEVICE bool await_turn() {
    return launch.mode != Mode::kUnfused || await_blocks(Role::kCompute, launch.blocks.compute, 0);
  }
  MK_HOST_DEVICE bool await_counted() { return await_planners(words->counted); }
  MK_HOST_DEVICE bool await_listed() { return await_planners(words->listed); }
  MK_HOST_DEVICE bool await_indexed(std::uint32_t local) {
    return await([&] { return site(FlagKind::kRowsIndexed, rank_of(local), local, 0, 0); },
                 word(at(schedule.indexed(local))), epoch);
  }
  MK_HOST_DEVICE bool await_all_indexed() {
    for (std::uint32_t local = 0; local < world.locals; ++local) {
      if (!await_indexed(local)) return false;
    }
    return true;
  }
  /// The plan blocks are done: lists, places, expected checks are made.
  MK_HOST_DEVICE bool await_plan() { return await_blocks(Role::kPlan, launch.blocks.plan, 1); }
  /// The tile of that flag (CombineSchedule::tile_flag) is in its slots.
  MK_HOST_DEVICE bool await_tile(std::uint32_t flag) {
    return await([&] { return tile_site(flag); }, word(at(schedule.tile_ready(flag))), epoch);
  }
  /// All that the run's tokens wait for. An executor that looks at many flags at once supplies
  ///     uint32_t first_missing(const CombineBlock&, const CombineRun&, uint32_t begin,
  ///                            uint64_t* seen);
  ///                          the first of those awaited from `begin` on, one at least, that is not
  ///                          there, or of those it looked at the end; and what that one showed
  MK_HOST_DEVICE bool await_run_of(const CombineRun& run) {
    const std::uint32_t count = awaited(run);
    if constexpr (requires(std::uint64_t * seen) {
                    executor.first_missing(*this, run, 0u, seen);
                  }) {
      for (std::uint32_t missing = 0; missing < count;) {
        const std::uint32_t first = missing;
        const bool reached = wait_until(
            executor, control, [&] { return awaited_site(run, first); }, totals.waits, epoch,
            [&](std::uint64_t* seen) {
              missing = executor.first_missing(*this, run, first, seen);
              return missing != first;
            });
        if (!reached) return false;
      }
      executor.loads_begin();
    } else {
      for (std::uint32_t i = 0; i < count; ++i) {
        const std::uint32_t* const flag = awaited_flag(run, i);
        if (flag != nullptr && !await([&] { return awaited_site(run, i); }, flag, epoch))
          return false;
      }
    }
    return true;
  }
  MK_HOST_DEVICE bool await_chunk_reduced(std::uint32_t node, std::uint32_t chunk) {
    return await([&] { return site(FlagKind::kChunkReduced, world.rank(), chunk, node, 1); },
                 word(at(schedule.chunk_reduced(node, chunk))), epoch);
  }
  MK_HOST_DEVICE bool await_arrival(std::uint32_t node, std::uint32_t chunk) {
    return this->await_arrival_flag(node, schedule.flags().arrival(bank, world.node, node, chunk),
                                    chunk);
  }

  // --- What is added up; calls visit(const std::byte* row) ---

  /// This node's rows of the token of the rail peer on `node`, in slot order.
  template <class Visit>
  MK_HOST_DEVICE void each_row(std::uint32_t node, std::uint32_t token, Visit&& visit) const {
    for (std::uint32_t slot = 0; slot < launch.plan.shape.top_k; ++slot) {
      if (entry(world.local, node, token, slot)->epoch == epoch)
        visit(static_cast<const std::byte*>(at(schedule.slot(node, token, slot))));
    }
  }
  /// The sums of this rank's token that have come from nodes [begin, end), in node order.
  template <class Visit>
  MK_HOST_DEVICE void each_sum(std::uint32_t begin, std::uint32_t end, std::uint32_t token,
                               Visit&& visit) const {
    for (std::uint32_t node = begin; node < end; ++node) {
      const std::uint32_t place = places(node)[token];
      if (place != 0) visit(received(node) + schedule.sum_in_bank(place - 1));
    }
  }

 private:
  /// Of one token: a row in that slot, or, behind the last slot, the sum of that node.
  struct Awaited {
    std::uint32_t token;
    std::uint32_t slot;
    std::uint32_t node;
  };
  MK_HOST_DEVICE Awaited awaited_at(const CombineRun& run, std::uint32_t which) const {
    const std::uint32_t each = awaited_each(run);
    const std::uint32_t i = which / each;
    const std::uint32_t slot = which - i * each;
    const std::uint32_t other = slot - launch.plan.shape.top_k;  // of the other nodes
    return {token_of(run, run.begin + i), slot, other < world.node ? other : other + 1};
  }
  MK_HOST_DEVICE WaitSite tile_site(std::uint32_t flag) const {
    const std::uint32_t local = flag / launch.plan.tiles_max;
    return site(FlagKind::kTileReady, rank_of(local), local, flag % launch.plan.tiles_max, 0);
  }
  /// Every plan block of this rank has shown the epoch in its one of `flags`.
  MK_HOST_DEVICE bool await_planners(const std::uint32_t* flags) {
    return this->await_each(launch.blocks.plan, epoch, FlagRow{flags}, [&](std::uint32_t block) {
      const auto plan_role = static_cast<std::uint32_t>(Role::kPlan);
      return site(FlagKind::kBlockDone, world.rank(), plan_role, block, 1);
    });
  }
};

}  // namespace mk::kernels
