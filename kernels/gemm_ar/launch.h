/// \file
/// What the blocks of one GEMM + AllReduce launch share. Plain data; the same struct goes to a CUDA
/// kernel.
#pragma once

#include <cstdint>

#include "kernels/comm/banks.h"
#include "kernels/comm/rank_context.h"
#include "kernels/comm/types.h"
#include "kernels/comm/wait.h"
#include "kernels/gemm_ar/geometry.h"
#include "shm/limits.h"

namespace mk::kernels {

/// Blocks of one role, at most.
inline constexpr std::uint32_t kGemmArBlocksMax = 128;

/// Words between blocks of one rank and between its launches. Zero before the first launch; each
/// has one writer.
struct GemmArLocal {
  std::uint32_t stop = 0;  ///< this launch has failed (any block writes it)
  std::uint32_t compute_done[kGemmArBlocksMax] =
      {};  ///< epoch in which the block stored its last tile
  std::uint32_t receive_done[kGemmArBlocksMax] =
      {};  ///< epoch in which the block read its last chunk
  /// Commands in the lane when it had sent all of a launch: once they are completed, the launch's
  /// staging bank may be written again. By epoch: while blocks of a launch still read the entry of
  /// the bank's last use, others already write this launch's.
  std::uint64_t sent[2 * kBanksMax][shm::kLanesMax] = {};
  WaitRecord failure;

  MK_HOST_DEVICE std::uint64_t* sent_in(std::uint32_t epoch) {
    return sent[epoch % (2 * kBanksMax)];
  }
};

/// Blocks of each role. Ranks may differ in them.
struct GemmArBlocks {
  std::uint32_t compute = 1;
  std::uint32_t reduce = 1;
  std::uint32_t send = 1;
  std::uint32_t receive = 1;
};

struct GemmArLaunch {
  GemmArGeometry plan;
  RankContext context;
  GemmArBlocks blocks;
  GemmArLocal* local = nullptr;
  WaitControl control;
  std::uint32_t epoch = 0;
  std::uint32_t m = 0;
  Mode mode = Mode::kFused;
};

}  // namespace mk::kernels
