/// \file
/// The numbers that all ranks of a GEMM+ReduceScatter agree on for the operator's lifetime:
/// shape, tiles, chunks, and where everything lies in the workspace. spec.h makes them; per launch:
/// schedule.h. Compiles for host and device.
#pragma once

#include <cstdint>

#include "kernels/comm/sum_geometry.h"

namespace mk::kernels {

/// Byte offsets in every rank's workspace, the same on all ranks. Sized for the largest launch. A
/// WorkspaceHead is in front. Slots exist only with several local ranks, the rest only with several
/// nodes.
struct GemmRsLayout {
  std::uint64_t tile_ready = 0;     ///< uint32[source local][node][tiles_max]
  std::uint64_t chunk_reduced = 0;  ///< uint32[node][chunks_max]
  std::uint64_t slots = 0;          ///< [source local][node][region_bytes]: partial tiles, packed
  std::uint64_t kept = 0;           ///< [region_bytes]: this node's sums of this rank's shard
  std::uint64_t staging = 0;        ///< [banks][nodes - 1][bank_bytes]: of the rail peers' shards
  std::uint64_t receive = 0;        ///< [banks][nodes - 1][bank_bytes]: the rail peers' sums
  std::uint64_t bytes = 0;

  std::uint64_t region_bytes = 0;  ///< tiles_max full tiles
  std::uint64_t bank_bytes = 0;    ///< a BankHeader, then tiles_max full tiles
};

/// Its packed tiles are one shard's.
struct GemmRsGeometry : SumGeometry {
  GemmRsLayout layout;
};

}  // namespace mk::kernels
