#include "kernels/comm/sum_plan.h"

#include <algorithm>

#include "kernels/comm/packed_tiles.h"
#include "shm/limits.h"

namespace mk::kernels {
namespace {

constexpr std::uint64_t kTilesMax = 1u << 30;  ///< of C
constexpr std::uint32_t kTilesWanted = 16;     ///< that one rank sums
constexpr std::uint32_t kChunksWanted = 8;     ///< that one rank sends
constexpr std::uint64_t kChunkBytesDefault = 256 * 1024;
constexpr std::uint64_t kChunkBytesMin = 32 * 1024;
constexpr std::uint64_t kChunkBytesMax = shm::kCommandPayloadBytesMax / 2;

std::uint64_t tiles_of_grid(const SumRules& rules, std::uint32_t n, const TileSides& tile) {
  return std::uint64_t{div_up(rules.rows, tile.rows)} * div_up(n, tile.columns);
}

std::uint64_t tile_bytes_max(const SumGeometry& geometry, std::uint32_t rows) {
  const std::uint32_t n = geometry.max.n;
  const std::uint64_t columns =
      round_up_to(div_up(n, div_up(n, geometry.tile_n)), geometry.epilogue.column_step());
  return std::min(geometry.tile_m, rows) * columns * bytes_of(geometry.partials);
}

/// Fewer rows make no larger tiles and no more of them, hence no more chunks.
Status choose_chunks(const SumRules& rules, const Tiling& tiling, SumGeometry& geometry) {
  const std::uint64_t tile_bytes = tile_bytes_max(geometry, rules.rows);
  const std::uint32_t wanted = div_up(kChunksWanted, rules.sent_grids) * rules.chunk_nodes;
  std::uint64_t chunk_bytes = tiling.chunk_bytes != 0 ? tiling.chunk_bytes : kChunkBytesDefault;
  const auto count = [&] {
    const auto bytes = static_cast<std::uint32_t>(chunk_bytes);
    return div_up(geometry.tiles_max, PackedTiles::per_chunk(tile_bytes, bytes));
  };
  if (tiling.chunk_bytes == 0) {
    while (count() < wanted && chunk_bytes > kChunkBytesMin) chunk_bytes /= 2;
  }
  const auto flags = [&] {
    return rules.chunk_nodes == 1 ? count() : 2 * div_up(count(), rules.chunk_nodes);
  };
  const auto too_many = [&] {
    if (geometry.nodes == 1) return false;
    // The map counts in 32 bits: so many from one sender are too many in any case.
    if (flags() > kOperatorFlagsMax) return true;
    return FlagMap{geometry.nodes, geometry.banks, flags()}.count() > kOperatorFlagsMax;
  };
  while (chunk_bytes <= kChunkBytesMax && too_many())
    chunk_bytes = std::max(chunk_bytes, tile_bytes) * 2;
  if (chunk_bytes > kChunkBytesMax) {
    return fail(ErrorCode::kLimitExceeded,
                "{}: {} tiles of {} bytes over {} nodes need chunks of {} bytes; at most {}",
                rules.op, geometry.tiles_max, tile_bytes, geometry.nodes, chunk_bytes,
                kChunkBytesMax);
  }
  geometry.chunk_bytes = static_cast<std::uint32_t>(chunk_bytes);
  geometry.chunks_max = count();
  return {};
}

}  // namespace

Result<SumGeometry> begin_sums(std::string_view op, std::uint32_t nodes, std::uint32_t locals,
                               Shape max, DType dtype, const Tiling& tiling,
                               const GemmResult& result) {
  MK_RETURN_IF_ERROR(check_world(op, nodes, locals));
  MK_RETURN_IF_ERROR(check_side(op, "m", max.m));
  MK_RETURN_IF_ERROR(check_side(op, "n", max.n));
  MK_RETURN_IF_ERROR(check_dtype(op, dtype));
  MK_RETURN_IF_ERROR(check_tiling(op, tiling));
  MK_RETURN_IF_ERROR(check_result(op, result, max.n));
  SumGeometry geometry;
  geometry.nodes = nodes;
  geometry.locals = locals;
  geometry.max = {max.m, max.n, 0};
  geometry.dtype = dtype;
  geometry.epilogue = result.epilogue;
  geometry.partials = result.partials;
  if (tiling.banks != 0) geometry.banks = tiling.banks;
  return geometry;
}

Status choose_sums(const SumRules& rules, const Tiling& tiling, SumGeometry& geometry) {
  const auto tiles = [&](const TileSides& sides) {
    return tiles_of_grid(rules, geometry.max.n, sides);
  };
  TileSides sides =
      choose_tile_sides(tiling, std::uint64_t{kTilesWanted} * rules.owners,
                        [&](const TileSides& tried) { return rules.owned_grids * tiles(tried); });
  sides.columns =
      static_cast<std::uint32_t>(round_up_to(sides.columns, geometry.epilogue.column_step()));
  geometry.tile_m = sides.rows;
  geometry.tile_n = sides.columns;
  if (const std::uint64_t all = tiles(sides) * rules.grids; all > kTilesMax) {
    return fail(ErrorCode::kLimitExceeded,
                "{}: {} x {} in tiles of {} x {} are {} tiles; at most {}: use larger tiles",
                rules.op, geometry.max.m, geometry.max.n, geometry.tile_m, geometry.tile_n, all,
                kTilesMax);
  }
  geometry.tiles_max = static_cast<std::uint32_t>((tiles(sides) + rules.owners - 1) / rules.owners);
  return choose_chunks(rules, tiling, geometry);
}

std::uint64_t packed_bytes_max(const SumGeometry& geometry, std::uint32_t rows) {
  return geometry.tiles_max * tile_bytes_max(geometry, rows);
}

std::uint64_t sum_fingerprint(std::uint64_t rules, const SumGeometry& geometry,
                              std::uint64_t bytes) {
  return fingerprint_of({geometry.flags().rules(rules), geometry.nodes, geometry.locals,
                         geometry.max.m, geometry.max.n, static_cast<std::uint64_t>(geometry.dtype),
                         geometry.tile_m, geometry.tile_n, geometry.chunk_bytes, geometry.banks,
                         bytes, static_cast<std::uint64_t>(geometry.epilogue.activation),
                         geometry.epilogue.bias ? 1u : 0u,
                         static_cast<std::uint64_t>(geometry.partials)});
}

}  // namespace mk::kernels
