/// \file
/// The numbers that all ranks of a GEMM + AllReduce agree on for the operator's lifetime: shape,
/// tiles, chunks, and where everything lies in the workspace. plan.h makes them; per launch:
/// schedule.h. Compiles for host and device.
#pragma once

#include <cstdint>

#include "kernels/comm/types.h"

namespace mk::kernels {

/// Byte offsets in every rank's workspace, the same on all ranks. Sized for the largest launch.
/// A WorkspaceHead is in front. Slots exist only with several local ranks, staging and receive
/// banks only with several nodes.
struct GemmArLayout {
  std::uint64_t tile_ready = 0;     ///< uint32[source local][owned_max]
  std::uint64_t chunk_reduced = 0;  ///< uint32[chunks_max]
  std::uint64_t out_ready = 0;      ///< uint32[owner local][chunks_max]
  std::uint64_t slots = 0;          ///< [source local][slot_region_bytes]: partial tiles, packed
  std::uint64_t staging = 0;        ///< [banks][bank_bytes]: this node's sums
  std::uint64_t receive = 0;        ///< [banks][nodes - 1][bank_bytes]: the rail peers' sums
  std::uint64_t out = 0;            ///< [m][n] row-major: C
  std::uint64_t bytes = 0;

  std::uint64_t slot_region_bytes = 0;  ///< owned_max full tiles
  std::uint64_t bank_bytes = 0;         ///< a BankHeader, then owned_max full tiles
};

struct GemmArGeometry {
  std::uint32_t nodes = 1;
  std::uint32_t locals = 1;
  Shape max;  ///< the largest m, and n; k is each rank's own and 0 here
  DType dtype = DType::kBf16;
  std::uint32_t tile_m = 0;
  std::uint32_t tile_n = 0;
  std::uint32_t chunk_bytes = 0;
  std::uint32_t banks = 2;
  std::uint32_t owned_max = 0;   ///< tiles of one owner, at most
  std::uint32_t chunks_max = 0;  ///< chunks of one owner, at most
  GemmArLayout layout;
};

}  // namespace mk::kernels
