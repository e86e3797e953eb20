/// \file
/// What the blocks of a gather do. Flags and commands are here, once for all operators and
/// executors; the executor brings the bulk copies:
///
///     void copy(const CopyJob&);     gather/copy_job.h
///     void start_dma(epoch, chunks);         if it has them: see start_dma and pass_on_by_dma
///     void pass_on_dma();                    below
///     const std::uint32_t* dma_passed_on();  a word that is 1 when they have passed on everything
///     void dma_done();                       this has been seen: it is 0 again, and no piece told
///     and what comm/block.h asks for
///
/// The way of a chunk, with the flag that hands each step to the next (all hold the epoch; each has
/// one writer):
///
///     role     on                   does                              then shows
///     share    its rank             caller's rows -> own slot (for
///                                   the network, or for peers to
///                                   pull; if they are not in place),
///                                   local ranks' slots                ready[origin][chunk] at each
///     send     its rail's ranks,    slot -> same slot of the rail's
///              round the ring       rank on the next node             arrival[bank][node][chunk]
///     receive  its rail's rank on   slot -> local ranks' slots
///              each other node      (kPull: nothing)                  ready[origin][chunk] at each
///     consumer every rank           reads the slots
///
/// With one node there is no send; with one local rank or one node no receive; with one rank
/// nothing.
///
/// Why nothing waits in a circle: within a launch, a rank's own chunks wait for nobody's of this
/// launch. A chunk at hop h waits for the same chunk at hop h - 1, and for those that its send and
/// receive blocks take before it. All ranks take them in one order (ChunkOrder), in which the chunk
/// at hop h - 1 comes first. (A block may have two roles, share and then receive.) Engines
/// that bring rows wait for the node's ranks to end e - b, then for arrivals in the order of their
/// hops. Only the readers of what they bring, and the end of their rank's receive role, wait for
/// them. Between launches: whatever launch e awaits of launch e - b (b: banks) ends without e.
///
/// Why nothing is overwritten too early (e: this launch, b = banks, for own rows local_banks):
///  - A local rank's slot, by share and receive, or by engines for them: written after that local
///    rank has ended e - b (WorkspaceHead::finished).
///  - This rank's own slot: the same. What a launch sends the daemon has read when it ends
///    (LocalWords::sent_in): rows in place are the caller's then.
///  - Slots that the network writes: written after the successor ended e - b, as the rank knows by
///    comm/banks.h. It hears of the successor, too, in every launch, by the last header to come
///    round the ring. That ends when its consumers and its receive blocks (and engines, which one
///    of these waits for) have read them, and its daemon has read what it forwarded. In a pull all
///    local ranks have drained them. Every chunk has arrived, so that none of e - b can be late and
///    overwrite one of e, or its flag.
#pragma once

#include <cstdint>

#include "kernels/comm/channel.h"
#include "kernels/gather/block.h"
#include "kernels/gather/copy_job.h"
#include "kernels/gather/sharing.h"
#include "kernels/gather/steps.h"

namespace mk::kernels::gather {

// Each role answers whether it ran to its end. If not, the launch has failed; its first cause is in
// LocalWords::failure.

/// In front of this rank's own rows, in any rank's slot.
template <class Executor>
MK_HOST_DEVICE inline void write_header(const GatherBlock<Executor>& gather, std::byte* slot) {
  auto* header = reinterpret_cast<GatherHeader*>(slot);
  header->epoch = gather.block.epoch;
  header->m = gather.block.common.m;
  header->rows = gather.own_rows;
}

/// Brings a chunk of this rank's own rows to the targets of `job`, which point to its place in the
/// slots; `job` is used up.
template <class Executor, class Source>
MK_HOST_DEVICE inline void share_chunk(GatherBlock<Executor>& gather, const Source& source,
                                       std::uint32_t chunk, const ByteRange& range, CopyJob& job) {
  auto& block = gather.block;
  if (chunk == 0) {
    MK_NO_UNROLL
    for (std::uint32_t i = 0; i < job.target_count; ++i) write_header(gather, job.targets[i]);
    return;
  }
  const std::uint64_t begin = range.begin - kGatherHeaderBytes;
  source.copy_packed(begin, begin + range.bytes, job,
                     [&](const CopyJob& part) { block.executor.copy(part); });
}

/// A broadcast's rows first to the local rank before this one (and to this rank's own slot, for the
/// network), then to the one before that, and so on. So each local rank has all rows of its next
/// one in an (L - 1)th of the time that everybody's take, and can compute with them. Each chunk is
/// read anew for each, which costs little where it is in a cache.
template <class Executor, class Source>
MK_HOST_DEVICE inline bool share_in_turn(GatherBlock<Executor>& gather, const Source& source) {
  auto& block = gather.block;
  const World& world = block.world;
  const std::uint32_t own = world.rank();
  for (std::uint32_t turn = 1; turn == 1 || turn < world.locals; ++turn) {
    const bool to_own = turn == 1 && world.nodes > 1 && !gather.in_place;
    const std::uint32_t local = (world.local + world.locals - turn) % world.locals;
    for (std::uint32_t chunk = block.index; chunk < gather.schedule.chunks(gather.own_rows);
         chunk += block.common.blocks.share) {
      if (block.stopped()) return false;
      const std::uint64_t begin_ns = block.span_begin();
      const ByteRange range = gather.schedule.chunk_range(gather.own_rows, chunk);
      CopyJob job;
      if (to_own) job.add_target(gather.slot(world.local, own) + range.begin);
      if (turn < world.locals) job.add_target(gather.slot(local, own) + range.begin);
      share_chunk(gather, source, chunk, range, job);
      if (to_own) gather.publish_ready_at(world.local, chunk);
      if (turn < world.locals) gather.publish_ready_at(local, chunk);
      block.span_end(begin_ns, SpanKind::kCopy, chunk, world.node, own);
    }
  }
  return true;
}

/// Has the executor bring this rank's own rows to the node's other ranks, and show their chunks
/// there, all but the header's, by engines that no block waits for. They may write from now on.
/// (Told with it: how many chunks a rank has at most.) Where a launch fails the executor starts
/// them, too, so that they end. What they write then must not make a launch of another rank look
/// right.
template <class Executor>
MK_HOST_DEVICE inline bool start_dma(GatherBlock<Executor>& gather) {
  auto& block = gather.block;
  const World& world = block.world;
  if (!gather.await_own_slots_free()) return false;
  MK_NO_UNROLL
  for (std::uint32_t i = 1; i < world.locals; ++i)
    write_header(gather, gather.slot((world.local + i) % world.locals, world.rank()));
  gather.publish_ready_elsewhere(0);
  if constexpr (requires { block.executor.start_dma(block.epoch, 0u); })
    block.executor.start_dma(block.epoch, gather.schedule.geometry().chunks_max);
  return true;
}

/// Hands out this rank's own rows, as `source` has them (GatherSource, or what else has its
/// copy_packed), to the network, where they are not in place, and to the node's ranks. It
/// goes chunk by chunk, or, of parts of each chunk, part by part. The function
/// next_step says which of them this block does. Only with several ranks. `in_turn`: a broadcast as
/// share_in_turn does it, chunk by chunk; else each chunk to everybody at once, but for what
/// `sharing` says.
template <class Executor, class Source>
MK_HOST_DEVICE inline bool share(GatherBlock<Executor>& gather, const Source& source,
                                 bool in_turn = false, const Sharing& sharing = {}) {
  auto& block = gather.block;
  const World& world = block.world;
  const bool broadcast = gather.schedule.geometry().kind == GatherKind::kBroadcast;
  const std::uint32_t own = world.rank();
  const bool to_own = !broadcast || (world.nodes > 1 && !gather.in_place);
  const bool to_others = broadcast && world.locals > 1 && !sharing.by_dma;
  if (sharing.by_dma && block.index == 0 && !start_dma(gather)) return false;
  if (!to_own && !to_others) return true;
  if (!gather.await_own_slots_free()) return false;
  if (in_turn && broadcast) return share_in_turn(gather, source);
  const std::uint32_t chunks = gather.schedule.chunks(gather.own_rows);
  const std::uint32_t most = sharing.network_first < chunks ? sharing.network_first : chunks;
  const std::uint32_t first = to_own && to_others ? most : 0;
  for (std::uint32_t step = block.index; step < (first + chunks) * sharing.parts;
       step = next_step(block, step, block.common.blocks.share, sharing.taken)) {
    if (block.stopped()) return false;
    const std::uint64_t begin_ns = block.span_begin();
    const Part part{step % sharing.parts, sharing.parts};
    const std::uint32_t turn = step / sharing.parts;
    const bool ahead = turn < first;
    const std::uint32_t chunk = ahead ? turn : turn - first;
    const ByteRange range = part_of(gather.schedule.chunk_range(gather.own_rows, chunk), part);
    CopyJob job;
    if (to_own && (ahead || chunk >= first))
      job.add_target(gather.slot(world.local, own) + range.begin);
    // Each rank starts with its next, so that nobody is everybody's first.
    MK_NO_UNROLL
    for (std::uint32_t i = 1; to_others && !ahead && i < world.locals; ++i)
      job.add_target(gather.slot((world.local + i) % world.locals, own) + range.begin);
    if (chunk != 0 || part.index == 0) share_chunk(gather, source, chunk, range, job);
    if (block.last_part(ahead ? chunks + chunk : chunk, part)) {
      // A chunk's two turns are dealt out to different blocks: neither speaks for the other.
      if (ahead || sharing.by_dma) {
        gather.publish_ready_here(chunk);
      } else if (chunk < first) {
        gather.publish_ready_elsewhere(chunk);
      } else {
        gather.publish_ready(own, chunk);
      }
    }
    block.span_end(begin_ns, SpanKind::kCopy, chunk, world.node, own);
  }
  return true;
}

/// Sends round the ring: runs of this rank's own chunks, and of its rail's others as they arrive
/// (ChunkOrder). It takes chunks `index`, `index` + `blocks`, ... of each shard, `index` being this
/// block's: runs may be shorter than there are blocks. Only with several nodes.
template <class Executor>
MK_HOST_DEVICE inline bool send_shards(GatherBlock<Executor>& gather, Channel<Executor>& channel,
                                       std::uint32_t blocks) {
  auto& block = gather.block;
  const World& world = block.world;
  const GatherSchedule& schedule = gather.schedule;
  const std::uint32_t to = schedule.successor();
  // Before the rows, which the first look may have to wait for.
  if (!gather.await_release()) return false;
  const auto chunks_of = [&](std::uint32_t hops) {
    return gather.await_chunk_count(world.rail_peer(schedule.node_at(hops)));
  };
  return schedule.order().for_each_run(chunks_of, [&](std::uint32_t hops, const ChunkRange& range) {
    const std::uint32_t node = schedule.node_at(hops);
    const std::uint32_t origin = world.rail_peer(node);
    const std::uint32_t rows = gather.row_count(origin);
    const Route route{to, gather.sent_from(origin), schedule.slot_elsewhere(block.bank, origin),
                      schedule.arrival(block.bank, to, node, 0)};
    if (hops == 0 && range.begin == 0 && gather.in_place && block.index == 0)
      write_header(gather, block.at(route.source));
    const std::uint32_t skipped = (block.index + blocks - range.begin % blocks) % blocks;
    const ChunkRun run = ChunkRun::below(range.end, range.begin + skipped, blocks);
    return channel.send_when_ready(
        {run, 1, schedule.geometry().chunk_bytes, node, nullptr},
        [&](std::uint32_t /*peer*/) { return route; },
        [&](std::uint32_t chunk) { return schedule.chunk_range(rows, chunk); },
        [&](std::uint32_t chunk, std::uint32_t count) {
          // A header by itself keeps the daemon as busy as a chunk: it goes with the first rows.
          const std::uint32_t least = chunk == 0 && count > 1 ? 2 : 1;
          return gather.await_sendable(origin, chunk, least, count, blocks);
        });
  });
}

/// Between two gathers of which the first is the more urgent. Block 0 sends all of the first. No
/// block sends anything of the second before every local rank has sent the first. Ranks of a node
/// may share a link, where what is given to it first goes first.
template <class Executor>
MK_HOST_DEVICE inline bool send_first(GatherBlock<Executor>& gather, Channel<Executor>& channel) {
  auto& block = gather.block;
  const GatherSchedule& schedule = gather.schedule;
  if (block.index == 0) {
    if (!send_shards(gather, channel, 1)) return false;
    block.publish_at_every_local(schedule.sent(block.world.local));
  }
  for (std::uint32_t local = 0; local < block.world.locals; ++local) {
    if (!block.await(
            block.site(FlagKind::kShardsSent, block.rank_of(local), local, 0, kGatherHopsMax + 1),
            block.word(block.at(schedule.sent(local))), block.epoch))
      return false;
  }
  return true;
}

/// After everything a send block sends in a launch but releases: notes what its ring's bytes may be
/// reused after.
template <class Executor>
MK_HOST_DEVICE inline void end_shards(OperatorBlock<Executor>& block, Channel<Executor>& channel) {
  channel.note_sent();
  block.publish_done(block.common.blocks.send);
}

/// Once per rank and launch, by one send block, after its send_shards and end_shards. It awaits all
/// that the end of the launch must come after (or `release`), but this rank's consumers, who may be
/// later.
template <class Executor>
MK_HOST_DEVICE inline bool settle(GatherBlock<Executor>& gather, Channel<Executor>& channel) {
  auto& block = gather.block;
  const World& world = block.world;
  const GatherSchedule& schedule = gather.schedule;
  const FlagMap flags = schedule.flags();
  const bool refresh = refresh_due(block.epoch, block.banks);
  for (std::uint32_t hops = 0; refresh && hops < schedule.shards_sent(); ++hops) {
    const std::uint32_t node = schedule.node_at(hops);
    const std::uint32_t rows = gather.row_count(world.rail_peer(node));
    if (!channel.signal_idle(flags, schedule.successor(), node, schedule.chunks(rows)))
      return false;
  }
  // The other ranks wait for these, as this one does for theirs.
  channel.flush();
  for (std::uint32_t hops = 1; hops < world.nodes; ++hops) {
    const std::uint32_t origin = world.rail_peer(schedule.node_at(hops));
    std::uint32_t rows = 0;
    if (!gather.await_row_count(origin, &rows) || !gather.await_rows(origin, 0, rows)) return false;
    if (refresh && !flags.for_idle_granules(schedule.chunks(rows), [&](std::uint32_t chunk) {
          return gather.await_chunk(origin, chunk);
        }))
      return false;
  }
  if (world.locals > 1 && !block.await_blocks(Role::kReceive, block.common.blocks.receive, 2))
    return false;
  return block.await_blocks(Role::kSend, block.common.blocks.send, 2) &&
         block.await_sent(block.epoch);
}

/// After `settle`, and, where `awaits_consumers`, after this rank's consumers have read the last
/// row: lets the predecessor fill the bank again, or sees that the end of the launch does.
template <class Executor>
MK_HOST_DEVICE inline bool release(GatherBlock<Executor>& gather, Channel<Executor>& channel) {
  auto& block = gather.block;
  const World& world = block.world;
  const GatherSchedule& schedule = gather.schedule;
  if (schedule.read_by_others()) {
    block.publish_at_every_local(schedule.drained(world.local));
    for (std::uint32_t local = 0; local < world.locals; ++local) {
      if (!block.await(block.site(FlagKind::kFinished, block.rank_of(local), local, 0, 2),
                       block.word(block.at(schedule.drained(local))), block.epoch))
        return false;
    }
  }
  if (!schedule.flags().has_releases()) return true;
  if (!channel.release(schedule.flags(), schedule.predecessor())) return false;
  channel.flush();
  return true;
}

/// The send role of an operator with one gather. `consumers_done()`: waits until this rank's
/// consumers have read the last row; false: the launch has failed. (An operator with several
/// gathers calls send_shards for each, end_shards, settle for each, and release for each.)
template <class Executor, class ConsumersDone>
MK_HOST_DEVICE inline bool send(GatherBlock<Executor>& gather, ConsumersDone&& consumers_done) {
  auto& block = gather.block;
  Channel<Executor> channel(block);
  if (!send_shards(gather, channel, block.common.blocks.send)) return false;
  end_shards(block, channel);
  if (block.index != 0) return true;
  return settle(gather, channel) && (!gather.schedule.awaits_consumers() || consumers_done()) &&
         release(gather, channel);
}

/// Brings the part of a chunk that has arrived to the node's others.
template <class Executor>
MK_HOST_DEVICE inline void hand_out(GatherBlock<Executor>& gather, std::uint32_t origin,
                                    const ByteRange& range) {
  const World& world = gather.block.world;
  CopyJob job;
  job.source = gather.slot(world.local, origin) + range.begin;
  MK_NO_UNROLL
  for (std::uint32_t i = 1; i < world.locals; ++i)
    job.add_target(gather.slot((world.local + i) % world.locals, origin) + range.begin);
  job.rows = 1;
  job.row_bytes = range.bytes;
  gather.block.executor.copy(job);
}

/// Tells the engines that bring this rank's own rows (start_dma) of each piece that has arrived. In
/// this order, after those rows, they pass it on to the node's others, and show its chunks there.
/// Headers this block hands out itself. Ends when the engines have read everything: then the
/// network may bring the next launch's rows. They go by addresses, so there is one bank. A launch
/// that fails tells them of all pieces, as it starts them (start_dma).
template <class Executor>
MK_HOST_DEVICE inline bool pass_on_by_dma(GatherBlock<Executor>& gather, std::uint32_t at_once) {
  auto& block = gather.block;
  const World& world = block.world;
  const GatherSchedule& schedule = gather.schedule;
  for (std::uint32_t hops = 1; hops < world.nodes; ++hops) {
    const std::uint32_t origin = world.rail_peer(schedule.node_at(hops));
    std::uint32_t rows = 0;
    if (!gather.await_row_count(origin, &rows)) return false;
    hand_out(gather, origin, schedule.chunk_range(rows, 0));
    gather.publish_ready(origin, 0);
    const std::uint32_t chunks = schedule.chunks(rows);
    for (std::uint32_t chunk = 1; chunk < chunks; chunk += at_once) {
      const std::uint32_t end = chunks - chunk < at_once ? chunks : chunk + at_once;
      if (!gather.await_chunks(origin, chunk, end)) return false;
      if constexpr (requires { block.executor.pass_on_dma(); }) block.executor.pass_on_dma();
    }
  }
  if constexpr (requires { block.executor.dma_passed_on(); }) {
    // Nobody stands between this rank and its own engines.
    if (!block.await(block.site(FlagKind::kPassedOn, world.rank(), 0, 0, 0),
                     block.executor.dma_passed_on(), 1))
      return false;
    block.executor.dma_done();
  }
  return true;
}

/// Hands out on this node what arrives for this rank's rail. It goes in the order of arrivals,
/// chunk by chunk, or, of parts of each chunk, part by part. The function next_step says which of
/// them this block does. (What engines pass on is block 0's affair.) For `receive`, and for an
/// operator with several gathers, whose block shows that it is done when it has received all of
/// them.
template <class Executor>
MK_HOST_DEVICE inline bool receive_shards(GatherBlock<Executor>& gather,
                                          const PassingOn& onward = {}) {
  auto& block = gather.block;
  const World& world = block.world;
  const GatherSchedule& schedule = gather.schedule;
  const std::uint32_t parts = onward.parts;
  if (!gather.await_others_slots_free()) return false;
  if (onward.dma_chunks != 0) {
    return block.index != 0 || pass_on_by_dma(gather, onward.dma_chunks);
  }
  std::uint32_t chunks_before = 0;   // of the runs before
  std::uint32_t step = block.index;  // of those of all runs
  const auto chunks_of = [&](std::uint32_t shard) {
    return gather.await_chunk_count(world.rail_peer(schedule.node_at(shard + 1)));
  };
  return schedule.order().for_each_run(chunks_of, [&](std::uint32_t shard, const ChunkRange& run) {
    const std::uint32_t node = schedule.node_at(shard + 1);
    const std::uint32_t origin = world.rail_peer(node);
    const std::uint32_t rows = gather.row_count(origin);
    const std::uint32_t chunks_after = chunks_before + run.end - run.begin;
    for (; step < chunks_after * parts;
         step = next_step(block, step, block.common.blocks.receive, onward.taken)) {
      const std::uint32_t turn = step / parts;
      const std::uint32_t chunk = run.end + turn - chunks_after;
      const Part part{step % parts, parts};
      if (!gather.await_chunk(origin, chunk)) return false;
      block.span_mark(SpanKind::kArrival, chunk, node, origin);
      const ByteRange range = part_of(schedule.chunk_range(rows, chunk), part);
      if (schedule.geometry().kind == GatherKind::kBroadcast && range.bytes != 0) {
        const std::uint64_t begin_ns = block.span_begin();
        hand_out(gather, origin, range);
        block.span_end(begin_ns, SpanKind::kCopy, chunk, node, origin);
      }
      if (block.last_part(turn, part)) gather.publish_ready(origin, chunk);
    }
    chunks_before = chunks_after;
    return true;
  });
}

/// The receive role of an operator with one gather. Only with several nodes and several local
/// ranks.
template <class Executor>
MK_HOST_DEVICE inline bool receive(GatherBlock<Executor>& gather, const PassingOn& onward = {}) {
  if (!receive_shards(gather, onward)) return false;
  // Also with no chunk of its own: the send block that releases waits for all receive blocks.
  gather.block.publish_done(gather.block.common.blocks.receive);
  return true;
}

}  // namespace mk::kernels::gather
