/// \file
/// The numbers that all ranks of a GEMM+Combine agree on for the operator's lifetime: shape,
/// tiles, chunks, and where everything lies in the workspace. spec.h makes them. Compiles for host
/// and device.
#pragma once

#include <cstdint>

#include "kernels/comm/banks.h"
#include "kernels/comm/types.h"

namespace mk::kernels {

/// What product rows and a node's sums are rounded to before they travel.
enum class CombinePartials : std::uint8_t {
  kElement = 0,  ///< to the element type
  kF32 = 1,      ///< not at all: twice the bytes
};
constexpr const char* name_of(CombinePartials partials) {
  return partials == CombinePartials::kF32 ? "f32" : "element";
}

struct CombineShape {
  std::uint32_t tokens_max = 0;  ///< T: of one rank, at most
  std::uint32_t hidden = 0;      ///< H: elements of a token
  std::uint32_t features = 0;    ///< I: columns of the rows that are multiplied
  std::uint32_t experts = 0;     ///< E: of all ranks
  std::uint32_t top_k = 0;       ///< k: experts of a token, at most
  CombinePartials partials = CombinePartials::kElement;
  friend constexpr bool operator==(const CombineShape&, const CombineShape&) = default;
};

/// Byte offsets in every rank's workspace, the same on all ranks. "Written by" names other ranks
/// than this one that write there.
struct CombineLayout {
  std::uint64_t words = 0;         ///< CombineWords
  std::uint64_t tiles = 0;         ///< CombineTile[tiles_max], by expert and row
  std::uint64_t order = 0;         ///< uint32[tiles_max]: row tiles in the order of computation
  std::uint64_t order_counts = 0;  ///< RowIndex::arrange's scratch
  std::uint64_t tile_parts = 0;    ///< uint32[tiles_max]: a GPU counts parts of row tiles there
  std::uint64_t block_notes = 0;   ///< CombineNote[kBlocksMax][ranks]: what each plan block found
  std::uint64_t peers = 0;         ///< CombinePeer[nodes]
  /// uint64[kBlocksMax + 1][ranks]: the checks that this rank's own ids ask for, as far as each
  /// plan block has looked at them; then of all
  std::uint64_t expected = 0;
  std::uint64_t counts = 0;         ///< CombineCounts[nodes][parts of the tokens]
  std::uint64_t lists = 0;          ///< uint32[nodes][tokens_max]: tokens that get a sum from here
  std::uint64_t places = 0;         ///< uint32[nodes][tokens_max]: 1 + where a node's sum arrives
  std::uint64_t chunk_reduced = 0;  ///< uint32[nodes][chunks_max]
  std::uint64_t indexed = 0;  ///< by the local ranks: a line each; epoch of its entries and notes
  std::uint64_t notes = 0;    ///< by the local ranks: CombineNote[locals][nodes]
  std::uint64_t tile_ready = 0;  ///< by the local ranks: uint32[locals][tiles_max]
  std::uint64_t entries = 0;     ///< by the local ranks: CombineEntry[nodes][tokens_max][top_k]
  std::uint64_t slots = 0;       ///< by the local ranks: [nodes][tokens_max][top_k] product rows
  std::uint64_t staging = 0;     ///< [banks][nodes - 1] of bank_bytes: a header, then sums
  std::uint64_t receive = 0;     ///< by the rail peers: the same
  std::uint64_t bank_bytes = 0;
  std::uint64_t bytes = 0;
};

struct CombineGeometry {
  std::uint32_t nodes = 1;
  std::uint32_t locals = 1;
  CombineShape shape;
  DType dtype = DType::kBf16;
  std::uint32_t tile_m = 0;
  std::uint32_t tile_n = 0;
  std::uint32_t row_pad = 0;  ///< a row tile is computed with a multiple of this many rows
  /// Tiles with tokens of one node go by so many steps of these tokens. The more there are, the
  /// sooner there is something to sum. But tiles of an expert, which share its weights, are the
  /// farther apart.
  std::uint32_t steps = 0;
  std::uint32_t banks = kBanksMax;
  std::uint32_t rows_max = 0;      ///< product rows of one rank: any routing's
  std::uint32_t tiles_max = 0;     ///< row tiles of one rank
  std::uint32_t chunk_tokens = 0;  ///< sums in one network command
  std::uint32_t chunks_max = 0;    ///< of one bank, the header's included
  CombineLayout layout;

  MK_HOST_DEVICE constexpr FlagMap flags() const { return {nodes, banks, chunks_max}; }
  MK_HOST_DEVICE constexpr std::uint32_t partial_bytes() const {
    return shape.partials == CombinePartials::kF32 ? 4 : kElementBytes;
  }
};

}  // namespace mk::kernels
