/// \file
/// Which tiles, chunks and sums are quickest on a GPU, as measured, and at which pace tiles leave
/// it: what an operator's tiling and its launches go by. Host arithmetic.
#pragma once

#include <cstdint>

#include "kernels/comm/launch.h"
#include "kernels/comm/shard.h"
#include "kernels/comm/sum_geometry.h"
#include "kernels/comm/types.h"
#include "kernels/cuda/cuda_options.h"

namespace mk::kernels::cuda {

inline constexpr std::uint32_t kTileRowsMax = 128;
inline constexpr std::uint32_t kTileColumnsMax = 256;

/// Rows of tiles in all shards of m rows.
inline std::uint64_t sharded_row_tiles(std::uint32_t m, std::uint32_t world) {
  return std::uint64_t{world} * div_up(shard_rows_max(m, world), kTileRowsMax);
}

/// How long half a tile takes, where a whole one takes 1: as measured, of tiles that stay here.
inline constexpr double kHalfTileTime = 0.54;
/// Of tiles that are summed. Within one node they are handed to their owners, with a flag each;
/// over several the network hides that.
constexpr double half_tile_time(std::uint32_t nodes) { return nodes > 1 ? kHalfTileTime : 0.67; }
/// The columns of a tile, of 128 rows, with which `row_tiles` rows of tiles of n columns take a
/// GPU's `blocks` SMs, some of which communicate, the shortest time.
std::uint32_t best_tile_columns(std::uint64_t row_tiles, std::uint32_t n, std::uint32_t blocks,
                                double half_tile_time);

/// Payload of a network command of a rank that sends about so many bytes in a launch; 0: the plan's
/// default. As measured over the loopback fabric (tests/bench/results).
constexpr std::uint32_t network_chunk_bytes(std::uint64_t sent_bytes) {
  constexpr std::uint64_t kMuch = 32u << 20;
  return sent_bytes >= kMuch ? 512u << 10 : 0;
}

/// FrameArguments::piece_ns of an operator that sums: what the options say, or, on one node of
/// several ranks with a GPU each, where by their rates the product takes longer than NVLink for
/// what a rank stores on others, a piece of a tile every so many nanoseconds. 0: none. (All at once
/// a tile stands in the way of the next one's loads.) `stores`: how often a rank stores each
/// element of C: 1: its partial, 2: results, too.
std::uint32_t tile_piece_ns(const SumGeometry& plan, std::uint32_t k, double stores,
                            const CudaOptions& options);

/// Tiles of a launch that are so few that sums beside the product would all come at its end: on a
/// node of two ranks, compute blocks that add up their rank's own tiles are quicker then. As
/// measured (kernels/cuda/decisions/deferred_accumulate.md).
inline constexpr std::uint32_t kFewTiles = 4 * kBlocksMax;

}  // namespace mk::kernels::cuda
