/// \file
/// Makes what all ranks of a MoE Dispatch+GEMM agree on, and says what an operator needs before
/// it exists: workspace and arrival flags. Host only.
#pragma once

#include <cstdint>

#include "kernels/comm/launch_work.h"
#include "kernels/comm/plan_tools.h"
#include "kernels/comm/world.h"
#include "kernels/gather/plan.h"
#include "kernels/ops/moe/geometry.h"
#include "kernels/ops/moe/launch.h"
#include "kernels/ops/moe/routing_plan.h"
#include "shm/host/result.h"

namespace mk::kernels {

/// What suits an executor; the same on all ranks.
struct MoeDispatchWay {
  /// Whether tokens, and routing, stay with one rank of each node and the others read them there,
  /// or each rank gets all of them.
  GatherKind kind = GatherKind::kPull;
  std::uint32_t steps = 16;  ///< RoutingShape's, 1 at least
  /// For copy engines within the node, of a broadcast: tokens of the node's ranks then have one
  /// bank, as copies go by addresses. Else make() tells the reason.
  bool engines = false;
};

/// The choices for GPUs. Each rank gets every token once: nearly every token has an expert on each
/// rank of a small node. Tiles of one expert stand together, as its weights stay in L2 then.
MoeDispatchWay moe_dispatch_cuda_way(std::uint32_t nodes);
/// How a GPU's `streams` warpgroups that stream are dealt out: those that plan come first.
/// `by_dma`: copy engines bring tokens within the node.
std::uint32_t moe_dispatch_plan_groups(std::uint32_t streams, std::uint32_t nodes,
                                       std::uint32_t locals, bool by_dma);
/// Bytes that copy engines bring at a time of a rank's `bytes` of tokens.
std::uint64_t moe_dispatch_dma_bytes(std::uint64_t bytes);

struct MoeDispatchPlan : MoeDispatchGeometry {
  /// Checks the arguments and fills in what was left open:
  ///  - tiles: 128 x 256, the longer side halved (to 32 x 64 at the least) while a rank would have
  ///    fewer than 16 at even routing. If asked for, tile_m is a power of two from 8 to 256;
  ///  - chunks: see GatherPlan::make; `tiling.chunk_bytes` goes for tokens and for routing;
  ///  - rows_max: enough for any routing, also where a token names one expert several times.
  /// hidden and features are multiples of 8, so that rows begin at multiples of 16 bytes; top_k is
  /// 1 to experts. Errors: kInvalidArgument, kLimitExceeded.
  static Result<MoeDispatchPlan> make(std::uint32_t nodes, std::uint32_t locals,
                                      const MoeDispatchShape& shape, DType dtype,
                                      const Tiling& tiling, const MoeDispatchWay& way = {});

  /// Bytes of the workspace, which starts out zeroed.
  std::uint64_t workspace_bytes() const { return layout.bytes; }
  /// The workspace's data lies `by` bytes further on, not right behind its words. Before the
  /// operator is made, and equally on all ranks.
  void move_data(std::uint64_t by);
  /// Arrival flags this operator needs in its session, which start out zero and at a multiple of
  /// shm::kFlagGranule; 0 with one node.
  std::uint32_t flag_count() const { return flags; }
  /// Of the rank in a launch with `tokens` tokens, as far as it can know before it has the others'
  /// routing: as if all ranks had as many, and all experts as many rows.
  LaunchWork work(const World& world, std::uint32_t tokens) const;
  /// kInvalidArgument when a launch of the rank brings no bias where the shape has one, or the
  /// other way round.
  Status check_bias(const World& world, const MoeDispatchInput& input) const;
  /// Why a launch of the rank computed nothing, with room for `capacity` rows: kInvalidArgument or
  /// kLimitExceeded.
  Error refusal(const World& world, std::uint32_t epoch, std::uint32_t capacity,
                const PlanSummary& summary) const;
  /// Equal on two ranks when their plans are: compare before the first launch.
  std::uint64_t fingerprint() const { return print; }

  std::uint32_t flags = 0;
  std::uint64_t print = 0;
  WorkspaceParts workspace;
};

}  // namespace mk::kernels
