/// \file
/// One gather as a block of a launch sees it: where rows lie, how it awaits them, and how it shows
/// that they are there. The roles that bring them are in roles.h.
///
/// A consumer (of the operator) reads its own rank's rows where its caller has them. For others:
///
///     if (!gather.await_rows(origin, begin, end)) return false;   // rows [begin, end) are here
///     const std::byte* row = gather.rows(origin) + begin * row_bytes;
///
/// It may read until it has told its send block that it is done (see `send` in roles.h). Where the
/// number of an origin's rows does not follow from m: await_row_count.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/comm/operator_block.h"
#include "kernels/gather/geometry.h"
#include "kernels/gather/schedule.h"

namespace mk::kernels {

/// WaitSite::hops of any wait for rows, at most: waits of ranks far down the ring last a little
/// longer, so that those next to the cause speak first. They last not much longer, however long the
/// ring. A wait for a role that waits for rows has one more.
inline constexpr std::uint32_t kGatherHopsMax = 4;

/// How many rows of an origin a block has seen arrive, one after the other from the first on. All
/// zero: none.
struct GatherProgress {
  std::uint32_t rows = 0;    ///< whole ones
  std::uint32_t chunks = 0;  ///< that they are in
};

/// A part of an operator's block. Cheap to make; an operator may have several, of several gathers.
template <class Executor>
class GatherBlock {
 public:
  /// `schedule` outlives the block. `own_rows`: of this rank, in this launch. `in_place` (a
  /// broadcast only): they lie at GatherSchedule::own_rows_in_place().
  MK_HOST_DEVICE GatherBlock(OperatorBlock<Executor>& block_in, const GatherSchedule& schedule_in,
                             std::uint32_t own_rows_in, bool in_place_in = false)
      : block(block_in), schedule(schedule_in), own_rows(own_rows_in), in_place(in_place_in) {}

  OperatorBlock<Executor>& block;
  const GatherSchedule& schedule;
  const std::uint32_t own_rows;
  const bool in_place;

  // --- Places ---

  /// The origin's slot in the workspace of a local rank. (kPull: rail_of(origin) only.)
  MK_HOST_DEVICE std::byte* slot(std::uint32_t local, std::uint32_t origin) const {
    return block.at(local, schedule.slot(block.bank, origin));
  }
  /// Where this rank reads the rows of another one, packed.
  MK_HOST_DEVICE const std::byte* rows(std::uint32_t origin) const {
    return slot(reads_from(origin), origin) + kGatherHeaderBytes;
  }

  /// Where the network reads a shard that this rank sends, as an offset in its workspace.
  MK_HOST_DEVICE std::uint64_t sent_from(std::uint32_t origin) const {
    const bool there = in_place && origin == block.world.rank();
    return schedule.slot(there ? 0 : block.bank, origin);
  }

  // --- Awaited by this block; false: the launch has failed ---
  // This rank's own rows need no waiting: for them all of these answer true at once.

  /// The chunk is where rows(origin) says.
  MK_HOST_DEVICE bool await_chunk(std::uint32_t origin, std::uint32_t chunk) {
    if (comes_by_a_neighbour(origin) &&
        !shm::flag_reached(word(schedule.ready(origin, chunk)), block.epoch)) {
      // If the local rank by whose way it comes is not even there, that one is to be named.
      const std::uint32_t by = block.rank_of(schedule.rail_of(origin));
      if (by != checked_ && !(await_landed(by, 0) && check_header(by))) return false;
    }
    return await_landed(origin, chunk);
  }
  /// The origin has begun this launch, with the same m, and says how many rows it has.
  MK_HOST_DEVICE bool await_row_count(std::uint32_t origin, std::uint32_t* count) {
    if (!await_header(origin)) return false;
    *count = row_count(origin);
    return true;
  }
  /// The chunks of an origin of this rail, whose header is there then; 0: the launch has failed.
  MK_HOST_DEVICE std::uint32_t await_chunk_count(std::uint32_t origin) {
    const bool here = await_landed(origin, 0) && check_header(origin);
    return here ? schedule.chunks(row_count(origin)) : 0;
  }
  /// The same, of an origin whose rows this block has awaited before.
  MK_HOST_DEVICE std::uint32_t row_count(std::uint32_t origin) const {
    if (origin == block.world.rank()) return own_rows;
    const std::uint32_t said = header(origin)->rows;
    // All ranks have the same rows_max; nothing a rank says may lead beyond a slot.
    const std::uint32_t most = schedule.geometry().rows_max;
    return said < most ? said : most;
  }
  /// Rows [begin, end) of the origin, who has begun this launch with the same m, are there.
  MK_HOST_DEVICE bool await_rows(std::uint32_t origin, std::uint32_t begin, std::uint32_t end) {
    if (!await_header(origin)) return false;
    if (origin == block.world.rank()) return true;
    const ChunkRange chunks = schedule.chunks_of_rows(begin, end);
    return await_chunks(origin, chunks.begin, chunks.end);
  }
  /// All rows of the origin before `end`, which is one at least, are there. The block notes in
  /// `progress` how far they have come: with rows that it has seen it has nothing to do.
  MK_HOST_DEVICE bool await_rows_before(std::uint32_t origin, std::uint32_t end,
                                        GatherProgress& progress) {
    if (end <= progress.rows || origin == block.world.rank()) return true;
    if (progress.chunks == 0) {
      if (!await_header(origin)) return false;
      progress.chunks = 1;
    }
    const std::uint32_t rows = row_count(origin);
    const std::uint32_t wanted = schedule.chunks(end < rows ? end : rows);
    const std::uint32_t seen = block.await_run(progress.chunks, wanted, schedule.chunks(rows),
                                               block.epoch, FlagRow{flags_of(origin)},
                                               [&](std::uint32_t i) { return site(origin, i); });
    if (seen < wanted) return false;
    block.executor.loads_begin();
    progress.chunks = seen;
    progress.rows = schedule.rows_in(seen, rows);
    return true;
  }
  /// Chunks [begin, end) of an origin whose header this block has awaited are there.
  MK_HOST_DEVICE bool await_chunks(std::uint32_t origin, std::uint32_t begin, std::uint32_t end) {
    return block.await_each(end - begin, block.epoch, FlagRow{flags_of(origin) + begin},
                            [&](std::uint32_t i) { return site(origin, begin + i); });
  }
  /// The origin's header is there, and its m is this launch's.
  MK_HOST_DEVICE bool await_header(std::uint32_t origin) {
    if (origin == checked_ || origin == block.world.rank()) return true;
    return await_chunk(origin, 0) && check_header(origin);
  }
  /// Everything of every rank: what an unfused consumer begins with.
  MK_HOST_DEVICE bool await_all() {
    for (std::uint32_t position = 1; position < block.world.size(); ++position) {
      const std::uint32_t origin = schedule.origin_at(position);
      std::uint32_t count = 0;
      if (!await_row_count(origin, &count) || !await_rows(origin, 0, count)) return false;
    }
    return true;
  }

  // --- Shown by this block ---

  /// The chunk may be read on this node. (The network reads what a send block has seen there.)
  MK_HOST_DEVICE void publish_ready(std::uint32_t origin, std::uint32_t chunk) {
    if (block.world.locals == 1)
      return block.publish_within_rank(word(schedule.ready(origin, chunk)));
    block.publish_at_every_local(schedule.ready(origin, chunk));
  }

  /// The chunk of this rank's own rows may be read by the other local ranks.
  MK_HOST_DEVICE void publish_ready_elsewhere(std::uint32_t chunk) {
    block.publish_at_other_locals(schedule.ready(block.world.rank(), chunk));
  }
  /// The chunk of this rank's own rows may be read by its send blocks.
  MK_HOST_DEVICE void publish_ready_here(std::uint32_t chunk) {
    block.publish_within_rank(word(schedule.ready(block.world.rank(), chunk)));
  }
  /// The chunk of this rank's own rows may be read by that local rank.
  MK_HOST_DEVICE void publish_ready_at(std::uint32_t local, std::uint32_t chunk) {
    block.publish_at_local(local, schedule.ready(block.world.rank(), chunk));
  }

  // --- For roles.h ---

  /// Of a shard that this rank sends: waits until `least` of the chunks `first`, `first` + `step`,
  /// ... are here (its own: until the share role has brought them to its slot, if they are not in
  /// place). Answers how many are, `most` at most; 0: the launch has failed.
  MK_HOST_DEVICE std::uint32_t await_sendable(std::uint32_t origin, std::uint32_t first,
                                              std::uint32_t least, std::uint32_t most,
                                              std::uint32_t step) {
    const bool own = origin == block.world.rank();
    if (own && in_place) return most;
    const std::uint32_t* flags = own ? word(schedule.ready(origin, 0)) : flags_of(origin);
    return block.await_run(0, least, most, block.epoch, FlagRow{flags + first, step},
                           [&](std::uint32_t i) {
                             const std::uint32_t chunk = first + i * step;
                             return own ? block.site(FlagKind::kRowsReady, origin, origin, chunk, 2)
                                        : site(origin, chunk);
                           });
  }
  /// The rank on the next node has done with what the bank's last launch brought it.
  MK_HOST_DEVICE bool await_release() {
    return block.await_release(schedule.flags(), schedule.successor());
  }
  /// No local rank reads or awaits anything any more of the last launch that had this rank's own
  /// rows, or those of other nodes, where this one has them.
  MK_HOST_DEVICE bool await_own_slots_free() {
    return block.await_all_finished(previous_use(block.epoch, schedule.geometry().local_banks));
  }
  MK_HOST_DEVICE bool await_others_slots_free() {
    return block.await_all_finished(previous_use(block.epoch, block.banks));
  }

 private:
  static constexpr std::uint32_t kNone = 0xffffffffu;

  /// Of the origin's chunks, one after the other.
  MK_HOST_DEVICE const std::uint32_t* flags_of(std::uint32_t origin) const {
    return arrives_here(origin) ? arrival(origin, 0) : word(schedule.ready(origin, 0));
  }
  MK_HOST_DEVICE bool await_landed(std::uint32_t origin, std::uint32_t chunk) {
    if (origin == block.world.rank()) return true;
    return block.await([&] { return site(origin, chunk); }, flags_of(origin) + chunk, block.epoch);
  }
  /// Of a header that is there.
  MK_HOST_DEVICE bool check_header(std::uint32_t origin) {
    if (origin != block.world.rank() && !block.check_m(site(origin, 0), header(origin)->m))
      return false;
    checked_ = origin;
    return true;
  }
  /// The origin is on another node, and its rows come to another local rank.
  MK_HOST_DEVICE bool comes_by_a_neighbour(std::uint32_t origin) const {
    return !arrives_here(origin) && schedule.node_of(origin) != block.world.node;
  }
  /// The local rank in whose workspace this rank reads the origin's rows.
  MK_HOST_DEVICE std::uint32_t reads_from(std::uint32_t origin) const {
    return schedule.geometry().kind == GatherKind::kPull ? schedule.rail_of(origin)
                                                         : block.world.local;
  }
  /// The network brings the origin's rows to this very rank.
  MK_HOST_DEVICE bool arrives_here(std::uint32_t origin) const {
    return schedule.rail_of(origin) == block.world.local;
  }
  MK_HOST_DEVICE const GatherHeader* header(std::uint32_t origin) const {
    return reinterpret_cast<const GatherHeader*>(slot(reads_from(origin), origin));
  }
  MK_HOST_DEVICE std::uint32_t* word(std::uint64_t offset) const {
    return block.word(block.at(offset));
  }
  MK_HOST_DEVICE const std::uint32_t* arrival(std::uint32_t origin, std::uint32_t chunk) const {
    return block.common.context.arrival_flags +
           schedule.arrival(block.bank, block.world.node, schedule.node_of(origin), chunk);
  }
  /// Who is behind when the chunk does not come: its origin, as far as one can know here. Where
  /// shards take turns, a chunk behind the header also waits for other ranks' chunks. Then the wait
  /// for the header of a rank that is missing is the one to speak first.
  MK_HOST_DEVICE WaitSite site(std::uint32_t origin, std::uint32_t chunk) const {
    const bool here = arrives_here(origin);
    const std::uint32_t node = schedule.node_of(origin);
    std::uint32_t hops = schedule.hops_from(node);
    if (hops > kGatherHopsMax || (hops != 0 && chunk != 0 && schedule.takes_turns()))
      hops = kGatherHopsMax;
    return block.site(here ? FlagKind::kArrival : FlagKind::kRowsReady, origin,
                      here ? node : origin, chunk, hops);
  }

  std::uint32_t checked_ = kNone;  ///< the origin whose header was checked last
};

}  // namespace mk::kernels
