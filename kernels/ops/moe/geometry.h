/// \file
/// The numbers that all ranks of a MoE Dispatch+GEMM agree on for the operator's lifetime. They are
/// shape, tiles, the two gathers, and the places in the workspace. spec.h makes them. Compiles for
/// host and device.
#pragma once

#include <cstdint>

#include "kernels/comm/types.h"
#include "kernels/gather/geometry.h"

namespace mk::kernels {

/// What becomes of a product row before it is rounded. Gated: the experts' weights have two columns
/// for each of the output's, a gate and an up projection. The output is silu(x gate) * (x up), in
/// fp32.
enum class MoeEpilogue : std::uint8_t {
  kNone = 0,
  kGatedSilu = 1,             ///< all gates, then all up projections
  kGatedSiluInterleaved = 2,  ///< a gate, its up projection, the next gate, ...
};
constexpr const char* name_of(MoeEpilogue epilogue) {
  return epilogue == MoeEpilogue::kNone        ? "none"
         : epilogue == MoeEpilogue::kGatedSilu ? "gated-silu"
                                               : "gated-silu-interleaved";
}

struct MoeDispatchShape {
  std::uint32_t tokens_max = 0;  ///< T: of one rank, at most
  std::uint32_t hidden = 0;      ///< H: elements of a token
  std::uint32_t features = 0;    ///< F: columns of the output
  std::uint32_t experts = 0;     ///< E: of all ranks
  std::uint32_t top_k = 0;       ///< k: experts of a token, at most
  std::uint32_t rows_max = 0;    ///< output rows of one rank, at most; 0: as many as can be
  MoeEpilogue epilogue = MoeEpilogue::kNone;
  bool bias = false;  ///< launches bring one element for each column of an expert's weights

  /// Of an expert's weights.
  MK_HOST_DEVICE constexpr std::uint32_t weight_columns() const {
    return epilogue == MoeEpilogue::kNone ? features : 2 * features;
  }
  friend constexpr bool operator==(const MoeDispatchShape&, const MoeDispatchShape&) = default;
};

/// Byte offsets in every rank's workspace, the same on all ranks; the gathers' parts are in their
/// own layouts. All but these is read and written by this rank alone.
struct MoeDispatchLayout {
  std::uint64_t words = 0;        ///< MoePlanWords
  std::uint64_t counts = 0;       ///< uint32[parts][experts of a rank + 1] (RoutingPlan)
  std::uint64_t places = 0;       ///< uint32[keys of tiles + 1][experts of a rank + 1]
  std::uint64_t offsets = 0;      ///< uint32[experts of a rank + 1]
  std::uint64_t tiles = 0;        ///< RowTile[tiles_max], in the order of computation
  std::uint64_t rows = 0;         ///< MoeRow[rows_max]
  std::uint64_t rows_packed = 0;  ///< uint32[tiles_max]: epoch in which the row tile was packed
  std::uint64_t packed = 0;  ///< [packed_rows_max][H]: the tiles' rows, one tile after the other
  std::uint64_t bytes = 0;
};

struct MoeDispatchGeometry {
  std::uint32_t nodes = 1;
  std::uint32_t locals = 1;
  MoeDispatchShape shape;  ///< rows_max as chosen
  DType dtype = DType::kBf16;
  std::uint32_t tile_m = 0;
  std::uint32_t tile_n = 0;
  std::uint32_t row_pad = 0;  ///< packed tiles have a multiple of this many rows
  std::uint32_t steps = 0;    ///< RoutingShape's
  std::uint32_t banks = 2;
  /// Copy engines may bring tokens within the node (MoeDispatchLaunch::by_dma).
  bool engines = false;
  GatherGeometry routing;  ///< a row: a token's k ids, then its k weights
  GatherGeometry tokens;   ///< a row: a token
  MoeDispatchLayout layout;
};

}  // namespace mk::kernels
