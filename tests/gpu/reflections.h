/// \file
/// What the other ranks of a mirrored rank's node, and the ranks of another node, bring it in a
/// launch: for each operator, the list that a Mirror works through.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/comm/tile_grid.h"
#include "kernels/comm/world.h"
#include "kernels/ops/ag_gemm/schedule.h"
#include "tests/gpu/mirror.h"
#include "tests/gpu/rank_operator.h"

namespace mk::test {

/// Where everything lies. The mirrored rank is 0; rank p < L is local rank p of its node, rank L
/// its rail peer on the other one, if there is one.
struct MirroredPlaces {
  std::vector<std::byte*> workspaces;             ///< by local rank; [0] is the rank's own
  std::uint32_t* arrivals = nullptr;              ///< the rank's arrival flags
  const std::uint32_t* arrivals_there = nullptr;  ///< rank L's
  std::uint32_t* counters = nullptr;  ///< GEMM+AR over nodes: zeroed, one for each out flag
  /// Zeroed, in the mirror's memory, for `Reflection::told`: one for each of rank 0's tiles
  /// (GEMM+AR on one node) or of its chunks on the network.
  std::uint32_t* told = nullptr;
  // By rank; [0] is null.
  std::vector<std::byte*> rows;         ///< AG+GEMM: a shard of A, packed
  std::vector<std::byte*> partials;     ///< p < L: tiles for rank 0, packed, node by node (GEMM+RS)
  std::vector<std::byte*> their_tiles;  ///< GEMM+AR, p < L: of the result, packed
  const std::byte* header = nullptr;    ///< AG+GEMM: in front of anybody's rows
  const std::byte* sums = nullptr;      ///< rank L's sums of rank 0's tiles: a bank, as it is sent
};

/// How a rank hands out rows (AG+GEMM), and so do its peers.
struct RowsOrder {
  kernels::Arrival arrival = kernels::Arrival::kSideBySide;  ///< AgGemmCuda::arrival
  bool by_dma = false;                                       ///< own rows come so (MirroredDma)
  std::uint32_t shared_parts = 1;                            ///< of each chunk of its own rows
  kernels::gather::PassingOn onward;  ///< those that came over the network; by engines: MirroredDma
};

/// `setup`: m rows that fall evenly on ranks and tiles. Ends the process where they don't.
Reflections reflections(const JobSetup& setup, const Plan& plan, const MirroredPlaces& places,
                        const RowsOrder& order, std::uint32_t epoch);

/// The world in which rank 0 is mirrored.
inline kernels::World mirrored_world(const JobSetup& setup) {
  return {setup.nodes, setup.locals, 0, 0};
}

/// Of a sum: rank 0's own tiles, by their number: where they lie in its shard (GEMM+AR: in C), and
/// how they are packed.
struct OwnTiles {
  std::vector<kernels::TileRect> places;
  std::uint64_t tile_bytes = 0;
  std::uint32_t tile_columns = 0;
};
OwnTiles own_tiles(const JobSetup& setup, const Plan& plan);

/// Ends the process, saying what is needed, unless it holds.
void demand(bool holds, const char* what);

}  // namespace mk::test
