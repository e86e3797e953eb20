/// \file
/// Makes what the ranks of an AllGather+GEMM agree on, and what this rank chooses for itself, and
/// says what an operator needs before it exists: workspace and arrival flags. Host only.
#pragma once

#include <cstdint>

#include "kernels/comm/launch_work.h"
#include "kernels/comm/plan_tools.h"
#include "kernels/comm/rank_context.h"
#include "kernels/comm/world.h"
#include "kernels/ops/ag_gemm/geometry.h"
#include "shm/host/result.h"

namespace mk::kernels {

struct AgGemmPlan : AgGemmGeometry {
  /// Checks the arguments and fills in what was left open:
  ///  - tiles: 128 x 256, the longer side halved (to 32 x 64 at the least) while a rank has fewer
  ///    than 16;
  ///  - chunks: see GatherPlan::make; by default 128 rows.
  /// `max`: m and k as on all ranks, n this rank's own, as is the epilogue. Of the tiling,
  /// chunk_bytes and both numbers of banks must be the same on all ranks. Errors: kInvalidArgument,
  /// kLimitExceeded.
  static Result<AgGemmPlan> make(std::uint32_t nodes, std::uint32_t locals, Shape max, DType dtype,
                                 const Tiling& tiling, const Epilogue& epilogue = {});

  /// The workspace's data lies `by` bytes further on, not right behind its words. Before the
  /// operator is made, and equally on all ranks.
  void move_data(std::uint64_t by);
  /// Arrival flags this operator needs in its session, which start out zero and at a multiple of
  /// shm::kFlagGranule; 0 with one node.
  std::uint32_t flag_count() const;
  /// Where, in its workspace, a rank's rows of A may lie so that they need no copy for the network:
  /// rows of k elements without gaps, the caller's between launches. Null for one rank alone.
  void* input(const RankContext& context) const;
  /// Whether `shard` lies there and the network is to read it. kInvalidArgument if it lies
  /// elsewhere in the workspace, or with gaps.
  Result<bool> in_place(const RankContext& context, const void* shard, std::uint64_t lda) const;
  /// Of the rank in a launch with m.
  LaunchWork work(const World& world, std::uint32_t m) const;
  /// Equal on two ranks when what they must agree on is: compare before the first launch.
  std::uint64_t fingerprint() const;

  WorkspaceParts workspace;
};

/// Whether a GPU's rows of the node come rank by rank. They do where a rank's own rows are done
/// with before rows of everybody could have come. There must be enough to compute to hide those of
/// the last. As measured (kernels/cuda/decisions/ag_rank_order.md).
constexpr bool ag_gemm_comes_in_turn(std::uint32_t nodes, const Shape& max) {
  constexpr std::uint32_t kFewRows = 2048;
  constexpr std::uint32_t kWide = 6144;
  return max.n >= kWide && max.m <= (nodes == 1 ? kFewRows : 2 * kFewRows);
}

}  // namespace mk::kernels
