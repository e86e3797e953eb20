/// \file
/// What an operator's blocks see of the outside: the local peers' memory, the lanes to the daemon,
/// the arrival flags, and the words that end a wait. Plain pointers and numbers, filled in by
/// libmkclient; the same struct goes to a CUDA kernel.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/comm/world.h"
#include "shm/limits.h"
#include "shm/ring.h"

namespace mk::kernels {

struct WorkspaceTurn;

/// A workspace that an operator shares with unlike ones.
struct WorkspaceShare {
  WorkspaceTurn* turn = nullptr;
  std::uint32_t sharer = 0;  ///< the operator's number among them
  std::uint64_t at = 0;      ///< where its workspace begins in the shared memory
};

/// A rank of the same rail on another node. (A GPU loads all of it at once.)
struct alignas(16) RailPeer {
  std::uint16_t rank = 0;
  std::uint16_t workspace_handle = 0;  ///< its handle of the memory with its operator's workspace
  std::uint32_t flag_base = 0;         ///< first flag of its operator's range, in its session
  std::uint64_t begin = 0;             ///< of the workspace in that memory, and in this rank's
};

/// Everything is mapped and stays valid as long as the operator lives.
struct RankContext {
  World world;

  /// The operator's workspace of every local rank, mapped here; `workspaces[world.local]` is this
  /// rank's own. All have the same layout (the operator's WorkspaceLayout).
  std::byte* workspaces[shm::kLocalRanksMax] = {};

  /// This rank's handle of its workspace, known to the daemon as a source.
  std::uint16_t workspace_handle = 0;
  /// Of `lanes`.
  std::uint32_t lane_count = 0;

  /// By node, of several; the entry of this rank's own node is unused. (Not in here: a CUDA block
  /// keeps a copy of all this in its shared memory.)
  const RailPeer* rail_peers = nullptr;

  /// The lanes this operator may use; each is driven by one send block. Their sequences go on from
  /// launch to launch, so the producers live in the session and are shared by its operators, one
  /// launch at a time.
  shm::RingProducer* lanes = nullptr;

  /// This rank's arrival flags: word 0 is flag `flag_base` of the session. The operator owns
  /// `flag_count` of them.
  std::uint32_t* arrival_flags = nullptr;
  std::uint32_t flag_base = 0;
  std::uint32_t flag_count = 0;

  /// Words that end every wait: the session's abort flag (written by the daemon) and the process's
  /// own (written when the daemon hangs up). Non-zero: leave.
  const std::uint32_t* session_abort = nullptr;
  const std::uint32_t* process_abort = nullptr;

  /// Null: its launches take no turns with unlike operators'. Kernels get null: turns are taken
  /// ahead of them. (A word more in here would cost them registers.)
  const WorkspaceShare* shared = nullptr;
};

}  // namespace mk::kernels
