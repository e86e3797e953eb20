/// \file
/// A send block's way into its lane: commands with credits, written while what they name is still
/// on its way. Many of them are committed under one fence. It also answers whether sent bytes may
/// be reused.
#pragma once

#include <cstdint>

#include "kernels/comm/rank_context.h"
#include "kernels/comm/wait.h"
#include "shm/command.h"
#include "shm/ring.h"

namespace mk::kernels {

/// Commands that a send role writes before it looks whether what they name is there: on a GPU one
/// thread does that.
inline constexpr std::uint32_t kCommandsAtOnce = 8;
/// A commit takes that thread so long on a GPU, whatever it commits.
inline constexpr double kCommitUs = 2;
static_assert(2 * kCommandsAtOnce <= shm::kRingSlotsMin, "there may be credits for them");

/// Drives lane `lane` for one launch. One thread. Commands are **added**, in any number that the
/// ring has credits for, and **committed** in that order, when what they name is there: only then
/// does the daemon see them. A role commits all it has added before it ends, and what is there
/// before it waits for anything that may depend on it.
///
/// The pacer is the block's executor. One whose clock is not CLOCK_MONOTONIC supplies, besides what
/// comm/wait.h asks for,
///     std::uint32_t commit_time_ns();        what a command says of its time
/// and one in virtual time, in which a commit would take none,
///     void committed();                      takes it
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

  /// A command for the daemon to copy `bytes` of this rank's workspace into the rail peer's on
  /// `node` and then to show `epoch` in flag `flag` of the peer's operator. False: the wait for a
  /// free slot failed.
  MK_HOST_DEVICE bool add_chunk(std::uint32_t node, std::uint64_t source_offset,
                                std::uint64_t target_offset, std::uint32_t bytes,
                                std::uint32_t flag, std::uint32_t epoch) {
    const RailPeer peer = context_.rail_peers[node];
    shm::Command command = to(peer, flag, epoch);
    command.opcode = shm::Opcode::kWrite;
    command.src_handle = context_.workspace_handle;
    command.dst_handle = peer.workspace_handle;
    command.src_offset = peer.begin + source_offset;
    command.dst_offset = peer.begin + target_offset;
    command.bytes = bytes;
    if (!add(command)) return false;
    payload_bytes_ += bytes;
    return true;
  }

  /// One that only shows `epoch` in the flag, and depends on nothing: where very many are added,
  /// they are committed meanwhile, with all that were added before.
  MK_HOST_DEVICE bool add_flag(std::uint32_t node, std::uint32_t flag, std::uint32_t epoch) {
    if (added_ >= kCommandsAtOnce) commit();
    shm::Command command = to(context_.rail_peers[node], flag, epoch);
    command.opcode = shm::Opcode::kWriteFlag;
    return add(command);
  }

  /// Commits the first `count` of those added. What this thread has stored or acquired before is
  /// visible to the daemon.
  MK_HOST_DEVICE void commit(std::uint32_t count) {
    if (count == 0) return;
    if constexpr (!kOwnTime) {
      const auto now = static_cast<std::uint32_t>(pacer_.now_ns());
      for (std::uint32_t i = 0; i < count; ++i) ring_.stamp(i, now);
    }
    ring_.commit(count);
    if constexpr (requires(Pacer & pacer) { pacer.committed(); }) pacer_.committed();
    added_ -= count;
    commands_ += count;
    store_ring();
    at_once_ = 2 * at_once_ < kCommandsAtOnce ? 2 * at_once_ : kCommandsAtOnce;
  }
  /// All of them.
  MK_HOST_DEVICE void commit() { commit(added_); }

  /// Commands added and not yet committed.
  MK_HOST_DEVICE std::uint32_t added() const { return added_; }

  /// So many commands for chunks of `chunk_bytes` are to be added, and what they name looked for,
  /// before the next commit, if there are so many. They are few at first, so that the network has
  /// something to do, unless it is done with those before the next ones come. Never less than
  /// before.
  MK_HOST_DEVICE std::uint32_t at_once(std::uint64_t chunk_bytes) const {
    constexpr std::uint64_t kSmallChunk = 64 << 10;
    return chunk_bytes <= kSmallChunk ? kCommandsAtOnce : at_once_;
  }

  /// Commands this lane has committed since it was made.
  MK_HOST_DEVICE std::uint64_t produced() const { return ring_.produced; }
  /// Commands of this sender that are committed, and payload bytes of those added.
  MK_HOST_DEVICE std::uint64_t commands() const { return commands_; }
  MK_HOST_DEVICE std::uint64_t payload_bytes() const { return payload_bytes_; }

 private:
  MK_HOST_DEVICE static shm::Command to(const RailPeer& peer, std::uint32_t flag,
                                        std::uint32_t epoch) {
    shm::Command command;
    command.peer = peer.rank;
    command.flag_index = peer.flag_base + flag;
    command.epoch = epoch;
    return command;
  }

  MK_HOST_DEVICE bool add(shm::Command command) {
    if constexpr (kOwnTime) command.commit_time_ns = pacer_.commit_time_ns();
    if (!await_credits(added_ + 1)) return false;
    ring_.write(added_, command);
    ++added_;
    return true;
  }

  MK_HOST_DEVICE bool await_credits(std::uint64_t count) {
    const auto site = [this] {
      WaitSite made;
      made.role = Role::kSend;
      made.kind = FlagKind::kCredit;
      made.block = lane_;
      made.rank = context_.world.rank();
      made.index[0] = lane_;
      return made;
    };
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

  static constexpr bool kOwnTime = requires(Pacer & pacer) { pacer.commit_time_ns(); };
  Pacer& pacer_;
  const WaitControl& control_;
  const RankContext& context_;
  WaitTotals& totals_;
  std::uint32_t lane_;
  shm::RingProducer ring_;     ///< the lane's; on a GPU each look at that takes half a microsecond
  std::uint32_t added_ = 0;    ///< and not committed
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
  const auto site = [&] {
    WaitSite made;
    made.role = role;
    made.kind = FlagKind::kCompleted;
    made.block = block;
    made.rank = context.world.rank();
    made.index[0] = lane;
    return made;
  };
  return wait_until(pacer, control, site, totals, count, [&](std::uint64_t* seen) {
    *seen = context.lanes[lane].completed();
    return *seen >= count;
  });
}

}  // namespace mk::kernels
