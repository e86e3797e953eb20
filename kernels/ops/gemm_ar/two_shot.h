/// \file
/// The two-shot form's part of roles.h. Each chunk of an owner has one node of the rail that adds
/// it up (schedule.h):
///
///     role     on           does                                       then shows
///     send     owner        staging -> receive bank of the chunk's
///                           node                                       arrival[bank][from][sums]
///     receive  that node's  staging and receive banks -> sum over
///                           nodes -> what is finished, packed          chunk_finished[round]
///     send     that node's  what is finished -> the same place at
///                           every rail peer arrival[bank][from][finished]
///     receive  owner        what is finished -> C of every local rank  out_ready[owner][chunk]
///
/// The header in front of each node's piece is sent in every launch, also where the piece has no
/// tile. So each rank still hears of all its rail peers in each launch (comm/banks.h).
///
/// Nobody waits in a circle. Sums that are sent wait for this node alone. A receive worker takes
/// its steps in one order, that of the rounds (FinishingOrder). Each step waits for sums, or for
/// steps that are earlier in that order on another node. The send role takes whichever chunk is
/// complete, and never waits for one of them alone.
///
/// Why nothing is overwritten too early: a launch ends on a rank with the finished chunks of all
/// nodes, so after they have read its sums. And a node finishes a chunk of the next launch with the
/// sums of ranks that have handed out all of this one's. So banks, releases and the daemon's
/// counters are needed for headers alone, which a node without a tile may read late.
#pragma once

#include <cstdint>

#include "kernels/comm/channel.h"
#include "kernels/ops/gemm_ar/block.h"
#include "kernels/ops/gemm_ar/node_sums.h"

namespace mk::kernels::gemm_ar {

/// The chunks of this node's sums that one send worker sends, each to the node that adds it up.
template <class Executor>
class SentSums {
 public:
  MK_HOST_DEVICE explicit SentSums(GemmArBlock<Executor>& block)
      : block_(block),
        positions_(block.schedule.chunks(block.world.local)),
        position_(block.index) {
    settle();
  }
  MK_HOST_DEVICE bool any() const { return position_ < positions_; }
  /// The next one is complete.
  MK_HOST_DEVICE bool ready() {
    ready_ = ready_ || (any() && block_.sees_reduced(chunk_, tiles_, &seen_));
    return ready_;
  }
  MK_HOST_DEVICE WaitSite site() const { return block_.site_of_reduced(chunk_, seen_); }
  MK_HOST_DEVICE bool send(Channel<Executor>& channel) {
    const GemmArSchedule& schedule = block_.schedule;
    const World& world = block_.world;
    const FlagMap flags = schedule.flags();
    const std::uint32_t round = chunk_ / world.nodes;
    const std::uint32_t to = chunk_ % world.nodes;
    const std::uint64_t staging = schedule.staging_bank(block_.bank, to);
    // The header is this role's own.
    if (round == 0) block_.write_header(staging);
    const Route route{to, staging, schedule.receive_bank(block_.bank, to, world.node),
                      flags.arrival(block_.bank, to, world.node, schedule.sums_flag(round))};
    if (!channel.send_now(flags, route, schedule.piece(world.local, to).chunk_range(round), chunk_))
      return false;
    position_ += block_.launch.blocks.send;
    settle();
    return true;
  }

 private:
  /// Goes on to the next chunk that leaves this node.
  MK_HOST_DEVICE void settle() {
    const World& world = block_.world;
    ready_ = false;
    for (; any(); position_ += block_.launch.blocks.send) {
      chunk_ = block_.schedule.chunk_at(world.node, world.local, position_);
      tiles_ = block_.schedule.chunk_tiles(world.local, chunk_);
      seen_ = tiles_.begin;
      const bool sent = tiles_.begin != tiles_.end || chunk_ < world.nodes;
      if (sent && chunk_ % world.nodes != world.node) return;
    }
  }

  GemmArBlock<Executor>& block_;
  const std::uint32_t positions_;
  std::uint32_t position_;
  std::uint32_t chunk_ = 0;
  TileRange tiles_;
  std::uint32_t seen_ = 0;  ///< of `tiles_`, the first that is not known to be complete
  bool ready_ = false;
};

/// The finished chunks that one send worker sends, each to every rail peer.
template <class Executor>
class SentFinished {
 public:
  MK_HOST_DEVICE explicit SentFinished(GemmArBlock<Executor>& block)
      : block_(block),
        rounds_(block.schedule.finished_chunks(block.world.local, block.world.node)),
        round_(block.index) {}
  MK_HOST_DEVICE bool any() const { return round_ < rounds_; }
  MK_HOST_DEVICE bool ready() {
    ready_ = ready_ || (any() && block_.sees_finished(chunk()));
    return ready_;
  }
  MK_HOST_DEVICE WaitSite site() const { return block_.site_of_finished(chunk()); }
  /// To the next peer.
  MK_HOST_DEVICE bool send(Channel<Executor>& channel) {
    const GemmArSchedule& schedule = block_.schedule;
    const World& world = block_.world;
    const FlagMap flags = schedule.flags();
    const std::uint32_t after = world.node + 1 + peer_;
    const std::uint32_t to = after < world.nodes ? after : after - world.nodes;
    const std::uint64_t finished = schedule.finished_bank(block_.bank, world.node);
    const TileRange tiles = schedule.chunk_tiles(world.local, chunk());
    const std::uint64_t bytes = schedule.finished_bytes();
    const ByteRange range{round_ * schedule.tiles_per_chunk() * bytes,
                          static_cast<std::uint32_t>((tiles.end - tiles.begin) * bytes)};
    const Route route{to, finished, finished,
                      flags.arrival(block_.bank, to, world.node, schedule.finished_flag(round_))};
    if (!channel.send_now(flags, route, range, chunk())) return false;
    if (++peer_ + 1 < world.nodes) return true;
    peer_ = 0;
    round_ += block_.launch.blocks.send;
    ready_ = false;
    return true;
  }

 private:
  MK_HOST_DEVICE std::uint32_t chunk() const {
    return round_ * block_.world.nodes + block_.world.node;
  }

  GemmArBlock<Executor>& block_;
  const std::uint32_t rounds_;
  std::uint32_t round_;
  std::uint32_t peer_ = 0;
  bool ready_ = false;
};

/// The send role's chunks: sums first, for which another node waits.
template <class Executor>
MK_HOST_DEVICE inline bool send_two_shot(GemmArBlock<Executor>& block, Channel<Executor>& channel) {
  const World& world = block.world;
  // Else the worker that stored a tile there has seen the bank free. The last piece is the least.
  if (block.schedule.pieces(world.local).piece_tiles(world.nodes - 1) == 0 &&
      !block.await_staging_free())
    return false;
  SentSums<Executor> sums(block);
  SentFinished<Executor> finished(block);
  while (sums.any() || finished.any()) {
    const auto site = [&] { return sums.any() ? sums.site() : finished.site(); };
    const bool reached =
        wait_until(block.executor, block.control, site, block.totals.waits, block.epoch,
                   [&](std::uint64_t* /*seen*/) { return sums.ready() || finished.ready(); });
    if (!reached) return false;
    for (std::uint32_t added = 0; added < kCommandsAtOnce; ++added) {
      if (sums.ready()) {
        if (!sums.send(channel)) return false;
      } else if (finished.ready()) {
        if (!finished.send(channel)) return false;
      } else {
        break;
      }
    }
    channel.flush();
  }
  channel.note_sent();
  return true;
}

/// Hands a finished chunk, or that part of it, to the local ranks.
template <class Executor>
MK_HOST_DEVICE inline bool hand_out_chunk(GemmArBlock<Executor>& block, std::uint32_t position,
                                          std::uint32_t chunk, Part part) {
  const World& world = block.world;
  const TilesPart mine = block.schedule.chunk_part(world.local, chunk, part);
  if (!block.await_finished_chunk(chunk)) return false;
  const std::uint32_t from = chunk % world.nodes;
  if (from != world.node) block.span_mark(SpanKind::kArrival, chunk, from, world.rail_peer(from));
  for (std::uint32_t owned = mine.tiles.begin; owned < mine.tiles.end; ++owned) {
    SumJob job = block.copy_of_finished(owned);
    if (job.take(mine.rows)) block.executor.sum(job);
  }
  if (block.last_part(position, part)) block.publish_out_ready(chunk);
  return true;
}

/// The receive role's `position`-th step, or that part of it.
template <class Executor>
MK_HOST_DEVICE inline bool receive_two_shot(GemmArBlock<Executor>& block, std::uint32_t position,
                                            Part part) {
  const World& world = block.world;
  const auto step = block.schedule.receive_step(world.local, world.node, position);
  const TileRange tiles = block.schedule.chunk_tiles(world.local, step.chunk);
  // Headers come in the first round, whether there are tiles or not.
  if (tiles.begin == tiles.end && !(step.sums && step.chunk < world.nodes)) return true;
  return step.sums ? receive_chunk(block, position, step.chunk, part)
                   : hand_out_chunk(block, position, step.chunk, part);
}

}  // namespace mk::kernels::gemm_ar
