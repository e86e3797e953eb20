/// \file
/// The vocabulary of communication between nodes, the same for all operators:
///
///     send when ready   Channel::send_when_ready: each chunk goes as soon as it is complete here.
///                       Its data lands at the rail peer, then the arrival flag publishes the epoch
///     send now          Channel::send_now: the same of one that is complete
///     signal            Channel::signal: a flag alone
///     release           Channel::release: the peer may fill this rank's bank again
///     flush             Channel::flush: the daemon sees all that was added
///     wait              OperatorBlock::await_arrival_flag: data has arrived; await_release: the
///                       peer has released its bank; await_sent: source bytes may be written again
///
/// Only a send worker has a channel. Any worker may wait. Compiles for host and device.
#pragma once

#include <cstdint>

#include "kernels/comm/banks.h"
#include "kernels/comm/chunk_sender.h"
#include "kernels/comm/operator_block.h"
#include "kernels/comm/tile_grid.h"

namespace mk::kernels {

/// The chunks of a buffer that one worker sends: `first`, `first` + `step`, ..., `count` of them.
struct ChunkRun {
  std::uint32_t first = 0;
  std::uint32_t step = 1;
  std::uint32_t count = 0;

  /// Those below `chunks`.
  MK_HOST_DEVICE static ChunkRun below(std::uint32_t chunks, std::uint32_t first,
                                       std::uint32_t step) {
    if (first >= chunks) return {first, step, 0};
    const std::uint32_t left = chunks - first;
    return {first, step, step == 1 ? left : div_up(left, step)};
  }
  MK_HOST_DEVICE std::uint32_t chunk(std::uint32_t turn) const { return first + turn * step; }
  /// The chunk that would come after the last one.
  MK_HOST_DEVICE std::uint32_t end() const { return chunk(count); }
};

/// The way of a buffer to a rail peer.
struct Route {
  std::uint32_t node = 0;    ///< the peer's
  std::uint64_t source = 0;  ///< where the buffer begins in this rank's workspace
  std::uint64_t target = 0;  ///< and in the peer's
  std::uint32_t flag = 0;    ///< the peer's arrival flag of chunk 0; the others' follow
};

/// What send_when_ready sends.
struct Sending {
  ChunkRun run;
  std::uint32_t peers = 1;                  ///< that each chunk goes to, one after the other
  std::uint64_t chunk_bytes = 0;            ///< of a whole chunk
  std::uint32_t origin = 0;                 ///< the node whose data it is; a trace names it
  const FlagMap* await_releases = nullptr;  ///< null: the caller knows that the banks are free
};

/// The way of one send worker to this rank's rail peers in one launch, through the ring of the
/// worker's index. One thread. `block` outlives it, and has counted what was sent when the channel
/// is gone.
template <class Executor>
class Channel {
 public:
  MK_HOST_DEVICE explicit Channel(OperatorBlock<Executor>& block)
      : block_(block),
        sender_(block.executor, block.control, block.common.context, block.index,
                block.totals.waits) {}
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;
  MK_HOST_DEVICE ~Channel() {
    block_.totals.commands += sender_.commands();
    block_.totals.network_bytes += sender_.payload_bytes();
  }

  /// Sends each chunk of the run, in its order, to each of its peers as soon as the chunk is
  /// complete. False: the launch has failed.
  ///
  ///     Route route_to(uint32_t peer);           peer: 0 .. peers - 1
  ///     ByteRange range_of(uint32_t chunk);      what of the buffer the chunk's command carries
  ///     uint32_t await_ready(uint32_t chunk, uint32_t count);
  ///
  /// `await_ready` waits until the chunk is complete, and answers how many of it and of the run's
  /// next ones are then, `count` at most; 0: the launch has failed. It may be asked about a chunk
  /// again, of which some peers have been sent theirs.
  ///
  /// Commands are written while the data is made, since one thread does both and a commit takes as
  /// long as a chunk or two. A peer that has not released its bank holds back no command to
  /// another one that comes before its first.
  template <class RouteTo, class RangeOf, class AwaitReady>
  MK_HOST_DEVICE bool send_when_ready(const Sending& sending, RouteTo&& route_to,
                                      RangeOf&& range_of, AwaitReady&& await_ready) {
    const ChunkRun& run = sending.run;
    const FlagMap* const releases = sending.await_releases;
    // What the first chunk needs besides its data, before that.
    if (releases != nullptr && run.count != 0 &&
        !block_.await_release(*releases, route_to(0u).node))
      return false;
    Position added;  // the first that is not
    for (Position sent; sent.turn < run.count;) {
      const std::uint32_t most = sender_.at_once(sending.chunk_bytes);
      for (; added.turn < run.count && sender_.added() < most; added.advance(sending.peers)) {
        const Route route = route_to(added.peer);
        if (releases != nullptr && releases->has_releases() && added.turn == 0 && added.peer != 0) {
          if (sender_.added() != 0) break;
          if (!block_.await_release(*releases, route.node)) return false;
        }
        const std::uint32_t chunk = run.chunk(added.turn);
        const ByteRange range = range_of(chunk);
        if (!sender_.add_chunk(route.node, route.source + range.begin, route.target + range.begin,
                               range.bytes, route.flag + chunk, block_.epoch))
          return false;
      }
      const std::uint32_t chunks = added.turn - sent.turn + (added.peer != 0 ? 1 : 0);
      const std::uint32_t ready = await_ready(run.chunk(sent.turn), chunks);
      if (ready == 0) return false;
      const std::uint32_t of_ready = ready * sending.peers - sent.peer;
      const std::uint32_t now = of_ready < sender_.added() ? of_ready : sender_.added();
      sender_.commit(now);
      for (std::uint32_t i = 0; i < now; ++i, sent.advance(sending.peers)) {
        block_.span_mark(SpanKind::kSend, run.chunk(sent.turn), sending.origin,
                         block_.world.rail_peer(route_to(sent.peer).node));
      }
    }
    return true;
  }

  /// Adds the command for what is complete: `range` of the route's buffer. It goes at the next
  /// flush at the latest. Waits until the peer has released its bank. False: the launch has failed.
  MK_HOST_DEVICE bool send_now(const FlagMap& releases, const Route& route, const ByteRange& range,
                               std::uint32_t chunk) {
    if (releases.has_releases()) {
      // A peer that has not holds back no command to another one.
      flush();
      if (!block_.await_release(releases, route.node)) return false;
    }
    if (!sender_.add_chunk(route.node, route.source + range.begin, route.target + range.begin,
                           range.bytes, route.flag, block_.epoch))
      return false;
    block_.span_mark(SpanKind::kSend, chunk, block_.world.node, block_.world.rail_peer(route.node));
    return true;
  }

  /// Publishes the epoch in flag `flag` of the rail peer on `node`, when the flag's turn in the
  /// ring comes: at the next flush at the latest. False: the launch has failed.
  MK_HOST_DEVICE bool signal(std::uint32_t node, std::uint32_t flag) {
    return sender_.add_flag(node, flag, block_.epoch);
  }
  /// Refreshes the arrival flags of `origin`'s data at `node` that a launch of `chunks` chunks
  /// leaves alone (banks.h: refresh_due).
  MK_HOST_DEVICE bool signal_idle(const FlagMap& flags, std::uint32_t node, std::uint32_t origin,
                                  std::uint32_t chunks) {
    return flags.for_idle_granules(chunks, [&](std::uint32_t chunk) {
      return signal(node, flags.arrival(block_.bank, node, origin, chunk));
    });
  }
  /// The rail peer on `node` may fill again what this rank has of it.
  MK_HOST_DEVICE bool release(const FlagMap& flags, std::uint32_t node) {
    return signal(node, flags.release(node, block_.world.node));
  }

  /// All that was added goes. What this thread has stored or acquired before is visible to the
  /// daemon.
  MK_HOST_DEVICE void flush() { sender_.commit(); }

  /// The bank's source bytes are those of the commands so far: await_sent waits until the daemon
  /// has read them.
  MK_HOST_DEVICE void note_sent() {
    block_.common.local->sent_in(block_.epoch)[block_.index] = sender_.produced();
  }

 private:
  /// A command: which chunk of the run goes to which peer.
  struct Position {
    std::uint32_t turn = 0;
    std::uint32_t peer = 0;
    MK_HOST_DEVICE void advance(std::uint32_t peers) {
      if (++peer < peers) return;
      peer = 0;
      ++turn;
    }
  };

  OperatorBlock<Executor>& block_;
  ChunkSender<Executor> sender_;
};

}  // namespace mk::kernels
