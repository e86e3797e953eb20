/// \file
/// A turn (workspace_turn.h) on a GPU. A small kernel takes it, on the stream, ahead of the
/// operator's own. It goes by words in the GPU's memory, so that a graph takes its turns without
/// the host when it is replayed.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/comm/wait.h"
#include "kernels/comm/workspace_head.h"
#include "kernels/comm/workspace_turn.h"
#include "kernels/comm/world.h"
#include "shm/limits.h"

namespace mk::kernels {

/// One rank's operator before its launches.
struct TurnGate {
  /// WorkspaceTurn's, as this GPU reaches it: no poller runs yet, so that flags and counters are
  /// the host's own.
  RankContext memory;
  std::uint64_t words_at = 0;  ///< where the operator's words begin there
  std::uint32_t sharer = 0;    ///< WorkspaceShare's
  /// Some rank's copy engines may bring rows that nobody waits for, and so write when all kernels
  /// of a launch have ended. The same on all ranks.
  bool outlasts = false;
  WaitControl control;  ///< the operator's, with the host's own words

  /// A turn's note in records of waits (await_ended), which is never 0: whom it waits for.
  static constexpr std::uint32_t note_of(std::uint64_t words_at) {
    return static_cast<std::uint32_t>(words_at / WorkspaceHead::kLine);
  }

  /// Words begin at lines: `outlasts` is their place's lowest bit.
  static constexpr std::uint64_t kOutlasts = 1;
  MK_HOST_DEVICE std::uint64_t mark() const { return words_at | (outlasts ? kOutlasts : 0); }

  /// In this rank's workspace: the mark() of who has launched last; 0: nobody has.
  MK_HOST_DEVICE std::uint64_t* last() const {
    return reinterpret_cast<std::uint64_t*>(memory.workspaces[memory.world.local] +
                                            WorkspaceTurn::kLastAt);
  }
  /// Turns so far.
  MK_HOST_DEVICE std::uint32_t* turns() const {
    return reinterpret_cast<std::uint32_t*>(last() + 1);
  }
  /// The word by which the local ranks of operator `words` hear that one has failed.
  MK_HOST_DEVICE std::uint32_t* failed(std::uint32_t local, std::uint64_t words) const {
    return reinterpret_cast<std::uint32_t*>(memory.workspaces[local] + words +
                                            WorkspaceHead::failed());
  }
};

/// Takes the turn, if the last launch was another operator's. False: the launch has failed, and
/// the operator's kernel ends at once. By all lanes of an executor, which has besides what a wait
/// needs
///
///     lane(), lanes()      this one's number, and how many there are
///     all(bool)            whether all lanes say so; no lane goes on before all have, and what any
///                          has seen until then all see
///     waits(bool begin)    some wait from now on, or none does any more
template <class Executor>
MK_HOST_DEVICE inline bool take_turn(Executor& executor, const TurnGate& gate, WaitTotals& totals) {
  const World& world = gate.memory.world;
  const std::uint64_t mark = shm::load_relaxed(gate.last());
  const std::uint32_t number = shm::load_relaxed(gate.turns()) + 1;
  executor.all(true);
  if (mark == gate.mark()) return true;
  if (executor.lane() == 0) {
    shm::store_relaxed(gate.last(), gate.mark());
    if (mark != 0) shm::store_relaxed(gate.turns(), number);
  }
  if (mark == 0) return true;
  const std::uint64_t before = mark & ~TurnGate::kOutlasts;
  const std::byte* const words = gate.memory.workspaces[world.local] + before;
  std::uint32_t* const failed_here = gate.failed(world.local, before);
  // This rank may have failed itself: then it waits for too little. Lanes may see it differently.
  const bool clean = executor.all(shm::load_acquire(failed_here) == 0);
  const WorkspaceHead head{world.locals};
  const auto ended_by = [&](std::uint32_t local) {
    return shm::load_acquire(reinterpret_cast<const std::uint32_t*>(words + head.finished(local)));
  };
  const bool by_ends = world.nodes == 1 && mark == before;
  const auto has_ended = [&](std::uint32_t local) {
    return clean && by_ends && shm::epoch_reached(ended_by(local), ended_by(world.local));
  };
  if (pass_each(executor, world.locals, has_ended)) return true;
  const auto refuse = [&](std::uint32_t) {
    WaitSite site;
    site.role = Role::kCollect;
    site.kind = FlagKind::kFinished;
    site.rank = shm::load_acquire(failed_here) - 1;
    site.index[0] = site.rank - world.node * world.locals;
    site.index[1] = TurnGate::note_of(before);
    const std::uint32_t ended = ended_by(site.index[0]);
    fail_wait(gate.control, site, WaitEnd::kPeerFailed, ended + 1, ended, 0);
    return false;
  };
  executor.waits(true);
  bool passed = false;
  if (!clean) {
    passed = pass_each(executor, world.locals, refuse);
  } else if (by_ends) {
    passed = pass_each(executor, world.locals, [&](std::uint32_t local) {
      return await_ended(executor, gate.control, world, words, local, TurnGate::note_of(before),
                         totals);
    });
  } else {
    ToldTurn turn{gate.memory, gate.control, number, gate.sharer, TurnGate::note_of(before)};
    turn.control.peer_failed = failed_here;
    passed = take_turn(executor, executor, turn, totals);
  }
  executor.waits(false);
  if (passed) return true;
  if (executor.lane() == 0) {
    // The operator's own kernel ends by the same cause.
    if (const std::uint32_t cause = shm::load_acquire(failed_here); cause != 0)
      shm::compare_exchange(gate.failed(world.local, gate.words_at), 0u, cause);
    // A rank that is still in that launch must not end it well: this rank's DMA engines may now
    // bring rows to where it reads (operator_kernel.cuh, let_dma_end).
    for (std::uint32_t local = 0; local < world.locals; ++local)
      shm::compare_exchange(gate.failed(local, before), 0u, world.rank() + 1);
  }
  return false;
}

}  // namespace mk::kernels
