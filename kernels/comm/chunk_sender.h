/// \file
/// A send block's way into its lane: commands with credits, many of them under one fence where the
/// executor can, and the question whether sent bytes may be reused.
#pragma once

#include <cstdint>

#include "kernels/comm/rank_context.h"
#include "kernels/comm/wait.h"
#include "shm/command.h"
#include "shm/ring.h"

namespace mk::kernels {

/// Chunks that a send role looks for at a time, and gives its sender before it flushes: on a GPU
/// one thread does that, 0.7 us for each, and meanwhile the first one waits. A flush takes 5 us.
inline constexpr std::uint32_t kChunksAtOnce = 8;

/// Commands that are committed together: as many as a warp has lanes beside its leader, which
/// commit one each.
struct CommandBatch {
  static constexpr std::uint32_t kCommandsMax = 31;
  shm::Command commands[kCommandsMax];
  std::uint32_t count = 0;
  std::uint32_t most = kCommandsMax;  ///< more are not collected before they are committed
};

/// Drives lane `lane` for one launch. One thread. The pacer is the block's executor; one that
/// commits many commands at once supplies, besides what comm/wait.h asks for,
///     CommandBatch& batch();                  empty at first; where commands wait to be committed
///     void commit_batch(shm::RingProducer&);  commits those in it, for which there are credits,
///     and
///                                             leaves it empty; what this thread stored or acquired
///                                             before is visible to the daemon
/// What was given to the sender may wait there until `flush`, so a role flushes before it waits for
/// anything that may depend on it, and at its end.
template <class Pacer>
class ChunkSender {
 public:
  MK_HOST_DEVICE ChunkSender(Pacer& pacer, const WaitControl& control, const RankContext& context,
                             std::uint32_t lane, WaitTotals& totals)
      : pacer_(pacer),
        control_(control),
        context_(context),
        totals_(totals),
        lane_(lane),
        ring_(context.lanes[lane]) {}

  /// Asks the daemon to copy `bytes` of this rank's workspace into the rail peer's on `node` and
  /// then to show `epoch` in flag `flag` of the peer's operator. Everything this thread stored or
  /// acquired before the next `flush` is visible to the daemon. False: the wait for a free slot
  /// failed.
  MK_HOST_DEVICE bool send_chunk(std::uint32_t node, std::uint64_t source_offset,
                                 std::uint64_t target_offset, std::uint32_t bytes,
                                 std::uint32_t flag, std::uint32_t epoch) {
    shm::Command command = to(node, flag, epoch);
    command.opcode = shm::Opcode::kWrite;
    command.src_handle = context_.workspace_handle;
    command.dst_handle = context_.rail_peers[node].workspace_handle;
    command.src_offset = source_offset;
    command.dst_offset = target_offset;
    command.bytes = bytes;
    if (!push(command)) return false;
    payload_bytes_ += bytes;
    return true;
  }

  /// Only shows `epoch` in the flag.
  MK_HOST_DEVICE bool send_flag(std::uint32_t node, std::uint32_t flag, std::uint32_t epoch) {
    shm::Command command = to(node, flag, epoch);
    command.opcode = shm::Opcode::kWriteFlag;
    return push(command);
  }

  /// Whatever was given to this sender is now with the daemon. False: as above.
  MK_HOST_DEVICE bool flush() {
    if constexpr (kBatches) {
      const std::uint32_t count = pacer_.batch().count;
      if (count == 0) return true;
      if (!await_credits(count)) return false;
      pacer_.commit_batch(ring_);
      store_ring();
      at_once_ = 2 * at_once_ < kChunksAtOnce ? 2 * at_once_ : kChunksAtOnce;
    }
    return true;
  }

  /// So many chunks of `chunk_bytes` are to be given to it before the next flush, if there are so
  /// many: few at first, so that the network has something to do, unless it is done with those
  /// before the next ones come.
  MK_HOST_DEVICE std::uint32_t at_once(std::uint64_t chunk_bytes) const {
    constexpr std::uint64_t kSmallChunk = 64 << 10;
    return chunk_bytes <= kSmallChunk ? kChunksAtOnce : at_once_;
  }

  /// Commands this lane has committed since it was made: all that were given, after a `flush`.
  MK_HOST_DEVICE std::uint64_t produced() const { return ring_.produced; }
  /// Of this sender.
  MK_HOST_DEVICE std::uint64_t commands() const { return commands_; }
  MK_HOST_DEVICE std::uint64_t payload_bytes() const { return payload_bytes_; }

 private:
  MK_HOST_DEVICE shm::Command to(std::uint32_t node, std::uint32_t flag,
                                 std::uint32_t epoch) const {
    shm::Command command;
    command.peer = context_.rail_peers[node].rank;
    command.flag_index = context_.rail_peers[node].flag_base + flag;
    command.epoch = epoch;
    return command;
  }

  /// A pacer whose clock is not CLOCK_MONOTONIC says what to write instead.
  MK_HOST_DEVICE std::uint32_t commit_time_ns() {
    if constexpr (requires(Pacer & pacer) { pacer.commit_time_ns(); }) {
      return pacer_.commit_time_ns();
    } else {
      return static_cast<std::uint32_t>(pacer_.now_ns());
    }
  }

  MK_HOST_DEVICE bool push(shm::Command command) {
    command.commit_time_ns = commit_time_ns();
    if constexpr (kBatches) {
      CommandBatch& batch = pacer_.batch();
      batch.commands[batch.count++] = command;
      ++commands_;
      const bool collects = batch.count < batch.most && batch.count < ring_.ring.slot_count();
      return collects || flush();
    } else {
      if (!await_credits(1)) return false;
      ring_.try_push(command);
      store_ring();
      ++commands_;
      return true;
    }
  }

  MK_HOST_DEVICE bool await_credits(std::uint64_t count) {
    WaitSite site;
    site.role = Role::kSend;
    site.kind = FlagKind::kCredit;
    site.block = lane_;
    site.rank = context_.world.rank();
    site.index[0] = lane_;
    // May wrap before the first lap: it is for the text only.
    const std::uint64_t wanted = ring_.produced + count - ring_.ring.slot_count();
    return wait_until(pacer_, control_, site, totals_, wanted, [&](std::uint64_t* seen) {
      const bool credits = ring_.has_credits(count);
      *seen = ring_.consumed_seen;
      return credits;
    });
  }

  /// For who drives the lane next.
  MK_HOST_DEVICE void store_ring() {
    shm::RingProducer& lane = context_.lanes[lane_];
    lane.produced = ring_.produced;
    lane.consumed_seen = ring_.consumed_seen;
  }

  static constexpr bool kBatches = requires(Pacer & pacer) { pacer.batch(); };
  Pacer& pacer_;
  const WaitControl& control_;
  const RankContext& context_;
  WaitTotals& totals_;
  std::uint32_t lane_;
  shm::RingProducer ring_;     ///< the lane's; on a GPU each look at that takes half a microsecond
  std::uint32_t at_once_ = 3;  ///< a header and two chunks of rows
  std::uint64_t commands_ = 0;
  std::uint64_t payload_bytes_ = 0;
};

/// Waits until the daemon has read the source bytes of the first `count` commands of lane `lane`.
/// From any block: it touches nothing but the daemon's counter.
template <class Pacer>
MK_HOST_DEVICE inline bool wait_completed(Pacer& pacer, const WaitControl& control,
                                          const RankContext& context, Role role,
                                          std::uint32_t block, std::uint32_t lane,
                                          std::uint64_t count, WaitTotals& totals) {
  WaitSite site;
  site.role = role;
  site.kind = FlagKind::kCompleted;
  site.block = block;
  site.rank = context.world.rank();
  site.index[0] = lane;
  return wait_until(pacer, control, site, totals, count, [&](std::uint64_t* seen) {
    *seen = context.lanes[lane].completed();
    return *seen >= count;
  });
}

}  // namespace mk::kernels
