/// \file
/// The numbers that all ranks of a GEMM+AllReduce agree on for the operator's lifetime: shape,
/// tiles, chunks, and where everything lies in the workspace. spec.h makes them; per launch:
/// schedule.h. Compiles for host and device.
#pragma once

#include <cstdint>

#include "kernels/comm/sum_geometry.h"

namespace mk::kernels {

/// Byte offsets in every rank's workspace, the same on all ranks. Sized for the largest launch.
/// A WorkspaceHead is in front. Slots exist only with several local ranks, staging and receive
/// banks only with several nodes.
struct GemmArLayout {
  std::uint64_t tile_ready = 0;     ///< uint32[source local][tiles_max]
  std::uint64_t chunk_reduced = 0;  ///< uint32[chunks_max]
  std::uint64_t out_ready = 0;      ///< uint32[owner local][chunks_max]
  std::uint64_t slots = 0;          ///< [source local][slot_region_bytes]: partial tiles, packed
  std::uint64_t staging = 0;        ///< [banks][bank_bytes]: this node's sums
  std::uint64_t receive = 0;        ///< [banks][nodes - 1][bank_bytes]: the rail peers' sums
  std::uint64_t out = 0;            ///< [m][n] row-major: C
  std::uint64_t bytes = 0;

  std::uint64_t slot_region_bytes = 0;  ///< tiles_max full tiles
  std::uint64_t bank_bytes = 0;         ///< a BankHeader, then tiles_max full tiles
};

/// Its packed tiles are those of one owner.
struct GemmArGeometry : SumGeometry {
  GemmArLayout layout;
};

}  // namespace mk::kernels
