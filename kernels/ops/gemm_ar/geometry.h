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
/// banks only with several nodes, the last two places before C only in the two-shot form.
struct GemmArLayout {
  std::uint64_t tile_ready = 0;      ///< uint32[source local][tiles_max]
  std::uint64_t chunk_reduced = 0;   ///< uint32[chunks_max]
  std::uint64_t out_ready = 0;       ///< uint32[owner local][chunks_max]
  std::uint64_t slots = 0;           ///< [source local][slot_region_bytes]: partial tiles, packed
  std::uint64_t staging = 0;         ///< [banks][planes][bank_bytes]: this node's sums
  std::uint64_t receive = 0;         ///< [banks][nodes - 1][bank_bytes]: the rail peers' sums
  std::uint64_t chunk_finished = 0;  ///< uint32[rounds]: of this node's piece
  std::uint64_t finished = 0;        ///< [banks][nodes][finished_bytes]: C's tiles, packed
  std::uint64_t out = 0;             ///< [m][n] row-major: C
  std::uint64_t bytes = 0;

  std::uint64_t slot_region_bytes = 0;  ///< tiles_max full tiles
  /// A BankHeader, then as many full tiles as one node adds up: tiles_max, or a piece's.
  std::uint64_t bank_bytes = 0;
  std::uint64_t finished_bytes = 0;  ///< a piece's tiles of C
};

/// Its packed tiles are those of one owner.
struct GemmArGeometry : SumGeometry {
  /// Over three nodes and more: one node of the rail adds up each chunk (schedule.h). Else each
  /// node adds up all.
  bool two_shot = false;
  GemmArLayout layout;

  /// Nodes to which different sums go.
  MK_HOST_DEVICE constexpr std::uint32_t planes() const { return two_shot ? nodes : 1; }
  /// An owner's chunks in the two-shot form are N to a round.
  MK_HOST_DEVICE constexpr std::uint32_t rounds_max() const { return chunks_max / nodes; }
  /// In the two-shot form a round of one sender has two flags: sums, and what is finished.
  MK_HOST_DEVICE constexpr FlagMap flags() const {
    return {nodes, banks, two_shot ? 2 * rounds_max() : chunks_max};
  }
};

}  // namespace mk::kernels
