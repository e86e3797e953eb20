/// \file
/// Makes what all ranks of a GEMM+AllReduce agree on, and says what an operator needs before it
/// exists: workspace and arrival flags. Host only.
#pragma once

#include <cstdint>

#include "kernels/comm/launch_work.h"
#include "kernels/comm/plan_tools.h"
#include "kernels/comm/types.h"
#include "kernels/comm/world.h"
#include "kernels/ops/gemm_ar/geometry.h"
#include "shm/host/result.h"

namespace mk::kernels {

struct GemmArPlan : GemmArGeometry {
  /// Checks the arguments, and chooses what is left open (comm/sum_plan.h: choose_sums). Errors:
  /// kInvalidArgument, kLimitExceeded.
  static Result<GemmArPlan> make(std::uint32_t nodes, std::uint32_t locals, Shape max, DType dtype,
                                 const Tiling& tiling, const GemmResult& result = {});

  /// Bytes of the workspace, which starts out zeroed.
  std::uint64_t workspace_bytes() const { return layout.bytes; }
  /// The workspace's data lies `by` bytes further on, not right behind its words. Before the
  /// operator is made, and equally on all ranks.
  void move_data(std::uint64_t by);
  /// Arrival flags this operator needs in its session, which start out zero and at a multiple of
  /// shm::kFlagGranule; 0 with one node.
  std::uint32_t flag_count() const;
  /// Of the rank in a launch with m, whose own inner dimension is k.
  LaunchWork work(const World& world, std::uint32_t m, std::uint32_t k) const;
  /// Equal on two ranks when their plans are: compare before the first launch.
  std::uint64_t fingerprint() const;

  WorkspaceParts workspace;
};

}  // namespace mk::kernels
