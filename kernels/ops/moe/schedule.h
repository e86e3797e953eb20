/// \file
/// One launch of MoE Dispatch+GEMM as index arithmetic: where its arrays lie, and which tile is
/// computed when. What depends on the routing is in routing_plan.h. Compiles for host and device.
///
/// The product of a row tile (rows of one expert) with the expert's weights is cut into column
/// tiles. A rank computes row tile by row tile in the routing plan's order (by class, step, expert,
/// row), of each its column tiles from left to right.
///
/// Network payload of one rank in one launch: that of two gathers (gather/schedule.h), together
///     sum over the nodes d but node + 1 of (128 + T(rail peer on d) * (8 k + 2 H))
#pragma once

#include <cstdint>

#include "kernels/comm/launch.h"
#include "kernels/comm/tile_grid.h"
#include "kernels/gather/schedule.h"
#include "kernels/ops/moe/geometry.h"
#include "kernels/ops/moe/routing_plan.h"

namespace mk::kernels {

/// Bytes of one of a token's k slots, in a row of the gather of routing: all ids, then all weights.
inline constexpr std::uint32_t kRoutingBytes = 8;

/// Words between the plan blocks of one rank.
struct MoePlanWords {
  std::uint32_t counted[kBlocksMax] = {};  ///< by block: epoch in which its parts were counted
  std::uint32_t arranged = 0;              ///< epoch in which offsets, tiles and summary were made
  PlanSummary summary;
};

MK_HOST_DEVICE constexpr RoutingShape routing_shape(const MoeDispatchGeometry& plan,
                                                    const World& world) {
  RoutingShape shape;
  shape.world = world;
  shape.experts = plan.shape.experts;
  shape.top_k = plan.shape.top_k;
  shape.tokens_max = plan.shape.tokens_max;
  shape.rows_max = plan.shape.rows_max;
  shape.tile_m = plan.tile_m;
  shape.row_pad = plan.row_pad;
  shape.steps = plan.steps;
  return shape;
}

class MoeDispatchSchedule {
 public:
  /// As the rank of `world` sees it.
  MK_HOST_DEVICE MoeDispatchSchedule(const MoeDispatchGeometry& plan, const World& world)
      : plan_(plan),
        columns_(1, plan.shape.features, 1, plan.tile_n),
        routing_(plan.routing, world),
        tokens_(plan.tokens, world) {}

  MK_HOST_DEVICE const GatherSchedule& routing() const { return routing_; }
  MK_HOST_DEVICE const GatherSchedule& tokens() const { return tokens_; }

  /// A rank of `row_tiles` row tiles has this many tiles to compute.
  MK_HOST_DEVICE std::uint64_t steps(std::uint32_t row_tiles) const {
    return std::uint64_t{row_tiles} * columns_.tiles_n();
  }
  MK_HOST_DEVICE std::uint32_t row_tile_at(std::uint64_t step) const {
    return static_cast<std::uint32_t>(step / columns_.tiles_n());
  }
  /// Where the step's tile lies among the row tile's columns.
  MK_HOST_DEVICE TileRect columns_at(std::uint64_t step) const {
    return columns_.rect(static_cast<std::uint32_t>(step % columns_.tiles_n()));
  }
  /// Column tiles of a row tile.
  MK_HOST_DEVICE std::uint32_t column_tiles() const { return columns_.tiles_n(); }
  /// Payload that this rank sends in a launch (the formula above); `tokens_of(rank)`.
  template <class TokensOf>
  MK_HOST_DEVICE std::uint64_t network_bytes(TokensOf&& tokens_of) const {
    return routing_.network_bytes(tokens_of) + tokens_.network_bytes(tokens_of);
  }

  // --- Places in this rank's workspace, as byte offsets ---

  MK_HOST_DEVICE std::uint64_t rows_packed(std::uint32_t row_tile) const {
    return plan_.layout.rows_packed + std::uint64_t{row_tile} * 4;
  }
  MK_HOST_DEVICE std::uint64_t packed_row(std::uint32_t row) const {
    return plan_.layout.packed + std::uint64_t{row} * token_bytes();
  }
  MK_HOST_DEVICE std::uint32_t token_bytes() const { return plan_.shape.hidden * kElementBytes; }

 private:
  MoeDispatchGeometry plan_;
  TileGrid columns_;
  GatherSchedule routing_;
  GatherSchedule tokens_;
};

}  // namespace mk::kernels
