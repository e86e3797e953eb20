/// \file
/// What the blocks of one launch share, of any operator: plain data, the same for a CUDA kernel. An
/// operator's launch derives from it and adds its geometry.
#pragma once

#include <cstdint>

#include "kernels/comm/banks.h"
#include "kernels/comm/rank_context.h"
#include "kernels/comm/types.h"
#include "kernels/comm/units.h"
#include "kernels/comm/wait.h"
#include "shm/limits.h"

namespace mk::kernels {

/// Blocks of one role, at most.
inline constexpr std::uint32_t kBlocksMax = 128;

/// Blocks of each role, which are its workers (units.h). Ranks may differ in them. Which roles an
/// operator has depends on it and on the world; of those it has not, the number is of no effect.
struct RoleBlocks {
  ComputeWorkers compute = 1;
  Workers reduce = 1;
  Workers send = 1;  ///< a lane each
  Workers receive = 1;
  Workers share = 1;
  Workers pull = 1;
  Workers plan = 1;
};

/// Words between blocks of one rank and between its launches. Zero before the first launch; each
/// has one writer.
struct LocalWords {
  std::uint32_t stop = 0;  ///< this launch has failed (any block writes it)
  /// By role and block: the epoch in which the block was done with what others wait for. (Where an
  /// executor counts blocks, OperatorBlock::publish_done, the last one writes the role's first.)
  std::uint32_t done[kRoles][kBlocksMax] = {};
  /// Commands in the lane when it had sent all of a launch: once they are completed, the sent bytes
  /// of the launch's bank may be written again. By epoch: while blocks of a launch still read the
  /// entry of the bank's last use, others already write this launch's.
  std::uint64_t sent[2 * kBanksMax][shm::kLanesMax] = {};
  WaitRecord failure;

  MK_HOST_DEVICE std::uint64_t* sent_in(std::uint32_t epoch) {
    return sent[epoch % (2 * kBanksMax)];
  }
  MK_HOST_DEVICE std::uint32_t* done_by(Role role) {
    return done[static_cast<std::uint32_t>(role)];
  }
};

struct Launch {
  RankContext context;
  RoleBlocks blocks;
  LocalWords* local = nullptr;
  WaitControl control;
  std::uint32_t banks = kBanksMax;
  std::uint32_t epoch = 0;
  std::uint32_t m = 0;       ///< rows of this launch, as the operator counts them
  Mode mode = Mode::kFused;  ///< never kAuto
};

}  // namespace mk::kernels
