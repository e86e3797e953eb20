/// \file
/// What a routing plan is made from, and what it consists of. Plain data for host and device.
#pragma once

#include <cstdint>

#include "shm/platform.h"

namespace mk::kernels {

/// One rank's routing: token t goes to the experts ids[t * stride + slot], 0 <= slot < top_k, where
/// -1 means nowhere, with weights[t * stride + slot].
struct RoutingTable {
  std::uint32_t tokens = 0;
  std::uint32_t stride = 0;
  const std::int32_t* ids = nullptr;
  const float* weights = nullptr;
};

/// Where a row of the output comes from, and with which weight a combine adds it there.
struct MoeRow {
  std::uint32_t rank = 0;   ///< whose token
  std::uint32_t token = 0;  ///< its row there
  std::uint32_t slot = 0;   ///< of its top_k
  float weight = 0;
  friend constexpr bool operator==(const MoeRow&, const MoeRow&) = default;
};
static_assert(sizeof(MoeRow) == 16);

/// A tile's rows: output rows [row, row + rows) of one expert. Packed, it has a multiple of row_pad
/// rows from `packed_row` on, the last of which mean nothing.
struct RowTile {
  std::uint32_t expert = 0;  ///< counted from this rank's first
  std::uint32_t row = 0;
  std::uint32_t rows = 0;
  std::uint32_t packed_row = 0;
  std::uint32_t hops = 0;  ///< of the source that arrives last: the tile's class
  /// Within its class, when the last of its rows is to be expected (RoutingShape::first_part_of).
  std::uint32_t step = 0;
};

/// Something that a table may not say: a token that goes to an expert that does not exist, or with
/// a weight that is no number.
struct RoutingFault {
  static constexpr std::uint32_t kNone = 0xffffffff;
  std::uint32_t rank = kNone;  ///< whose table; kNone: all is well
  std::uint32_t token = 0;
  std::uint32_t slot = 0;
  std::int32_t id = 0;
  MK_HOST_DEVICE bool any() const { return rank != kNone; }
  friend bool operator==(const RoutingFault&, const RoutingFault&) = default;
};

/// What arrange() found.
struct PlanSummary {
  std::uint32_t rows = 0;   ///< of the output; also when they do not fit
  std::uint32_t tiles = 0;  ///< 0 when nothing is to be computed
  std::uint32_t fits = 0;   ///< 1: the rows fit, and all tables make sense
  RoutingFault fault;       ///< the first one in the order of the parts
};

}  // namespace mk::kernels
