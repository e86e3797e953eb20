/// \file
/// Makes what all ranks of a GEMM+Combine agree on, and says what an operator needs before it
/// exists: workspace and arrival flags. Host only.
#pragma once

#include <cstdint>

#include "kernels/comm/launch_work.h"
#include "kernels/comm/plan_tools.h"
#include "kernels/comm/world.h"
#include "kernels/ops/combine/geometry.h"
#include "kernels/ops/combine/launch.h"
#include "shm/host/result.h"

namespace mk::kernels {

/// CombineGeometry::steps of GPUs, the same on all ranks. Where sums travel, they had better begin
/// early (a guess). On one node each step would read all weights again, and lateness.h does what
/// steps are for.
constexpr std::uint32_t combine_cuda_steps(std::uint32_t nodes) { return nodes > 1 ? 4 : 1; }

struct CombinePlan : CombineGeometry {
  /// Checks the arguments and fills in what was left open:
  ///  - tiles: 128 x 256, the longer side halved (to 32 x 64 at the least) while a rank would have
  ///    fewer than 16 at even routing. If asked for, tile_m is a power of two from 8 to 256;
  ///  - chunks: 256 KiB, halved (to 32 KiB at the least) while a full bank would have fewer than 8.
  ///    They are whole tokens, one at least, and larger than asked for where their flags would
  ///    exceed kOperatorFlagsMax.
  /// hidden and features are multiples of 8, so that rows begin at multiples of 16 bytes; top_k is
  /// 1 to experts. `steps`: what suits the executor, 1 at least. Errors: kInvalidArgument,
  /// kLimitExceeded.
  static Result<CombinePlan> make(std::uint32_t nodes, std::uint32_t locals,
                                  const CombineShape& shape, DType dtype, const Tiling& tiling,
                                  std::uint32_t steps = 16);

  /// Bytes of the workspace, which starts out zeroed.
  std::uint64_t workspace_bytes() const { return layout.bytes; }
  /// The workspace's data lies `by` bytes further on, not right behind its words. Before the
  /// operator is made, and equally on all ranks.
  void move_data(std::uint64_t by);
  /// Arrival flags this operator needs in its session, which start out zero and at a multiple of
  /// shm::kFlagGranule; 0 with one node.
  std::uint32_t flag_count() const;
  /// Of a rank with `rows` product rows and `tokens` tokens, as if the others had as many and all
  /// experts were alike.
  LaunchWork work(std::uint32_t rows, std::uint32_t tokens) const;
  /// Why a launch of the rank, with `tokens` tokens, stored nothing: kInvalidArgument or
  /// kLimitExceeded.
  Error refusal(const World& world, std::uint32_t tokens, const CombineRefusals& refusals) const;
  /// Equal on two ranks when their plans are: compare before the first launch.
  std::uint64_t fingerprint() const;

  WorkspaceParts workspace;
};

}  // namespace mk::kernels
