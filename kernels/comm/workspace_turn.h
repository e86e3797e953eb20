/// \file
/// Operators of one session that share a workspace: each has words of its own there, and all have
/// the data. A launch by another operator than the last one's is a turn. It begins when nobody in
/// the node reads or writes what the last one had there, and no rail peer's node does either.
///
/// All ranks launch in one order, so they count turns alike. Launches of one operator in a row
/// take no turn, and wait for nothing that they would not wait for alone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/comm/chunk_sender.h"
#include "kernels/comm/launch.h"
#include "kernels/comm/rank_context.h"
#include "kernels/comm/wait.h"
#include "kernels/comm/workspace_head.h"

namespace mk::kernels {

/// Operators that one shared workspace takes in its life, those that are gone included.
inline constexpr std::uint32_t kSharersMax = 256;
/// Flags by which a node says that a turn may begin: an operator's is that of its number, so that a
/// rank in another operator's turn is seen to be.
inline constexpr std::uint32_t kTurnFlags = 16;
/// Every so many turns all of them are sent: none is so old that it counts as reached
/// (shm::epoch_reached).
inline constexpr std::uint32_t kTurnFlagsAnew = 1u << 20;

/// One rank's view of a workspace that operators share. The same on all ranks, but for addresses.
struct WorkspaceTurn {
  /// The whole memory: where it begins on every local rank, its handles, and the arrival flags of
  /// turns, kTurnFlags for each node.
  RankContext context;
  std::uint64_t words_at[kSharersMax] = {};  ///< where an operator's words begin
  const char* names[kSharersMax] = {};       ///< for people
  std::uint32_t number = 0;                  ///< of turns so far
  std::uint32_t last = 0;                    ///< 1 + the operator that launched last; 0: none has
  std::uint32_t before = 0;                  ///< likewise, the one before the turn
  std::uint32_t failed = 0;                  ///< 1 + the operator whose launch failed; 0: none
  /// On a GPU, where streams take the turns (turn_gate.h): `last` is the operator whose launch was
  /// put on a stream last, into this capture (0: into none).
  std::uint64_t capture = 0;
  bool captured = false;                   ///< a launch is in a graph, which may run at any time
  bool in_graph[kSharersMax] = {};         ///< likewise, of each operator
  std::uint32_t queued[kSharersMax] = {};  ///< launches that were put on streams

  MK_HOST_DEVICE static constexpr std::uint32_t flags(std::uint32_t nodes) {
    return nodes > 1 ? nodes * kTurnFlags : 0;
  }
  /// The flag, at every node, by which node `from` says that the operator's turn may begin.
  MK_HOST_DEVICE static constexpr std::uint32_t flag(std::uint32_t from, std::uint32_t sharer) {
    return from * kTurnFlags + sharer % kTurnFlags;
  }
  /// The memory begins with words, of a line each: up to which turn a local rank has done with all
  /// before it, and the daemon with what it has sent, on several nodes. The word at one local rank
  /// by another.
  static constexpr std::uint64_t kLastAt = shm::kLocalRanksMax * WorkspaceHead::kLine;
  /// On a GPU the next line says, to this rank alone, who has launched last (turn_gate.h), and the
  /// rail peers of several nodes follow.
  static constexpr std::uint64_t kPeersAt = kLastAt + WorkspaceHead::kLine;
  static constexpr std::uint64_t head_bytes(std::uint32_t nodes) {
    return kPeersAt + (nodes > 1 ? nodes * sizeof(RailPeer) : 0);
  }
  MK_HOST_DEVICE static std::uint32_t* left(const RankContext& memory, std::uint32_t at,
                                            std::uint32_t by) {
    return reinterpret_cast<std::uint32_t*>(memory.workspaces[at] + WorkspaceHead::kLine * by);
  }
  /// The word in this rank's workspace where a local rank says what it has ended last.
  MK_HOST_DEVICE const std::uint32_t* finished(std::uint32_t sharer, std::uint32_t local) const {
    const World& world = context.world;
    return reinterpret_cast<const std::uint32_t*>(context.workspaces[world.local] +
                                                  words_at[sharer] +
                                                  WorkspaceHead{world.locals}.finished(local));
  }
};

/// Waits until a local rank has ended the last launch that this one has ended of the operator with
/// `words`, in this rank's workspace. Within a node a turn waits so for all. `note`: names the turn
/// in the wait's record.
template <class Executor>
MK_HOST_DEVICE inline bool await_ended(Executor& executor, WaitControl control, const World& world,
                                       const std::byte* words, std::uint32_t local,
                                       std::uint32_t note, WaitTotals& totals) {
  const WorkspaceHead head{world.locals};
  const auto word = [words](std::uint64_t offset) {
    return reinterpret_cast<const std::uint32_t*>(words + offset);
  };
  // A rank that failed in that launch does not end it.
  control.peer_failed = word(WorkspaceHead::failed());
  WaitSite site;
  site.role = Role::kCollect;
  site.kind = FlagKind::kFinished;
  site.rank = world.node * world.locals + local;
  site.index[0] = local;
  site.index[1] = note;
  site.hops = 1;
  // This rank's launches follow each other: what it has ended last of the other is the last one.
  const std::uint32_t ended = shm::load_acquire(word(head.finished(world.local)));
  return wait_flag(executor, control, site, totals, word(head.finished(local)), ended);
}

/// Threads that take a turn together: a CPU has one.
struct SoleLane {
  static constexpr std::uint32_t lane() { return 0; }
  static constexpr std::uint32_t lanes() { return 1; }
  static constexpr bool all(bool yes) { return yes; }
};
/// Deals 0 to count - 1 to the lanes: whether `pass` says so of each. No lane goes on before all.
template <class Lanes, class Pass>
MK_HOST_DEVICE inline bool pass_each(const Lanes& lanes, std::uint32_t count, Pass pass) {
  bool passed = true;
  for (std::uint32_t i = lanes.lane(); passed && i < count; i += lanes.lanes()) passed = pass(i);
  return lanes.all(passed);
}

/// A turn that ranks tell each other of: of several nodes, or after launches whose end says too
/// little (TurnGate::outlasts).
struct ToldTurn {
  const RankContext& memory;  ///< WorkspaceTurn's
  WaitControl control;        ///< with the word by which ranks in the last launch say they failed
  std::uint32_t number;       ///< of turns, with this one
  std::uint32_t sharer;       ///< whose it is
  std::uint32_t note;         ///< in records of waits
};

/// Takes it, with all lanes. False: the launch has failed.
template <class Executor, class Lanes>
MK_HOST_DEVICE inline bool take_turn(Executor& executor, const Lanes& lanes, const ToldTurn& turn,
                                     WaitTotals& totals) {
  const RankContext& memory = turn.memory;
  const World& world = memory.world;
  const auto site = [&](FlagKind kind, std::uint32_t rank, std::uint32_t index,
                        std::uint32_t hops) {
    WaitSite made;
    made.role = Role::kCollect;
    made.kind = kind;
    made.rank = rank;
    made.index[0] = index;
    made.index[1] = turn.note;
    made.hops = hops;
    return made;
  };
  // The daemon has read all that this rank has sent from there: a local rank will write over it.
  const bool sent = pass_each(lanes, memory.lane_count, [&](std::uint32_t lane) {
    return wait_completed(executor, turn.control, memory, Role::kCollect, 0, lane,
                          memory.lanes[lane].produced, totals);
  });
  if (!sent) return false;
  pass_each(lanes, world.locals, [&](std::uint32_t local) {
    shm::store_release(WorkspaceTurn::left(memory, local, world.local), turn.number);
    return true;
  });
  const bool left = pass_each(lanes, world.locals, [&](std::uint32_t local) {
    const std::uint32_t rank = world.node * world.locals + local;
    return wait_flag(executor, turn.control, site(FlagKind::kFinished, rank, local, 1), totals,
                     WorkspaceTurn::left(memory, world.local, local), turn.number);
  });
  if (!left) return false;
  if (world.nodes == 1) return true;
  const bool all_anew = turn.number % kTurnFlagsAnew == 0;
  const std::uint32_t first = all_anew ? 0 : turn.sharer;
  const std::uint32_t flags = all_anew ? kTurnFlags : 1;
  const auto tell_nodes = [&] {
    ChunkSender<Executor> sender(executor, turn.control, memory, 0, totals);
    for (std::uint32_t i = 0; i < flags * world.nodes; ++i) {
      const std::uint32_t node = i / flags;
      const std::uint32_t flag = WorkspaceTurn::flag(world.node, first + i % flags);
      if (node != world.node && !sender.add_flag(node, flag, turn.number)) return false;
    }
    sender.commit();
    return true;
  };
  if (!lanes.all(lanes.lane() != 0 || tell_nodes())) return false;
  return pass_each(lanes, flags * world.nodes, [&](std::uint32_t i) {
    const std::uint32_t node = i / flags;
    // Two hops: the peer waits for its own node first.
    return node == world.node ||
           wait_flag(executor, turn.control,
                     site(FlagKind::kRelease, world.rail_peer(node), node, 2), totals,
                     memory.arrival_flags + WorkspaceTurn::flag(node, first + i % flags),
                     turn.number);
  });
}

/// Before a launch's blocks, by one thread of an executor (comm/wait.h): takes the operator's turn,
/// if the last launch was another's. False: the launch has failed.
template <class Executor>
MK_HOST_DEVICE inline bool take_turn(Executor& executor, const Launch& launch, WorkspaceTurn& turn,
                                     WaitTotals& totals) {
  const World& world = launch.context.world;
  const std::uint32_t sharer = launch.context.shared->sharer;
  const std::uint32_t before = turn.last;
  if (before == sharer + 1) return true;
  turn.before = before;
  turn.last = sharer + 1;
  if (before == 0) return true;  // nobody has ever been here
  ++turn.number;
  const std::byte* const words = turn.context.workspaces[world.local] + turn.words_at[before - 1];
  if (world.nodes == 1) {
    for (std::uint32_t local = 0; local < world.locals; ++local) {
      if (!await_ended(executor, launch.control, world, words, local, sharer, totals)) return false;
    }
    return true;
  }
  ToldTurn over_nodes{turn.context, launch.control, turn.number, sharer, sharer};
  // A rank that failed in the last one's launch does not end it.
  over_nodes.control.peer_failed =
      reinterpret_cast<const std::uint32_t*>(words + WorkspaceHead::failed());
  return take_turn(executor, SoleLane{}, over_nodes, totals);
}

}  // namespace mk::kernels
