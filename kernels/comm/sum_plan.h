/// \file
/// Chooses the tiles and chunks of the operators that sum (sum_geometry.h). Host only.
#pragma once

#include <cstdint>
#include <string_view>

#include "kernels/comm/plan_tools.h"
#include "kernels/comm/sum_geometry.h"
#include "shm/host/result.h"

namespace mk::kernels {

/// How an operator deals its tiles out. A grid covers `rows` rows of C. The tiles of one grid that
/// have one owner are packed together, and cut into chunks, which go to the same ranks.
struct SumRules {
  std::string_view op;            ///< in messages
  std::uint32_t rows = 0;         ///< that a grid covers in the largest launch
  std::uint32_t owners = 1;       ///< of one grid's tiles, each of its share
  std::uint32_t owned_grids = 1;  ///< of which one rank has a share
  std::uint32_t grids = 1;        ///< that make up C
  std::uint32_t sent_grids = 1;   ///< of which one rank sends its share
  /// Nodes to which the chunks of a share are dealt, two flags to a round; 1: each chunk goes to
  /// every node, and has a flag.
  std::uint32_t chunk_nodes = 1;
};

/// Checks what an operator that sums is given, and begins its geometry with it.
Result<SumGeometry> begin_sums(std::string_view op, std::uint32_t nodes, std::uint32_t locals,
                               Shape max, DType dtype, const Tiling& tiling,
                               const GemmResult& result);

/// Chooses what the tiling leaves open, and fills in the geometry:
///  - tiles: 128 x 256, the longer side halved (to 32 x 64 at the least) while an owner would have
///    fewer than 16;
///  - chunks: 256 KiB, halved (to 32 KiB at the least) while a rank would send fewer than 8 in a
///    launch (to one other rank, or of each grid alike). They are larger than asked for where the
///    flags of all chunks would exceed kOperatorFlagsMax.
/// kLimitExceeded.
Status choose_sums(const SumRules& rules, const Tiling& tiling, SumGeometry& geometry);

/// Bytes of `tiles_max` of the largest packed tiles of any launch with up to `rows` rows. Launches
/// with fewer rows may have larger tiles than the largest launch (129 rows give two tiles of 65,
/// 128 one of 128). So this is by the tile's limit.
std::uint64_t packed_bytes_max(const SumGeometry& geometry, std::uint32_t rows);

/// Which numbers the ranks compare. `rules`: the version of what follows from them; `bytes`: of the
/// workspace.
std::uint64_t sum_fingerprint(std::uint64_t rules, const SumGeometry& geometry,
                              std::uint64_t bytes);

}  // namespace mk::kernels
