/// \file
/// Parts of a chunk, for launches with so few chunks that several blocks share in each: the last of
/// them to be done shows the chunk. Which parts there are is the executor's choice; where it has no
/// choice, a chunk is one part. Compiles for host and device.
#pragma once

#include <cstdint>

#include "kernels/comm/tile_grid.h"
#include "shm/platform.h"

namespace mk::kernels {

/// Part `index` of `count`.
struct Part {
  std::uint32_t index = 0;
  std::uint32_t count = 1;
};

/// Calls `take(chunk, part)` for parts `index`, `index` + `blocks`, ... of all of `chunks` chunks
/// of `parts` parts each, until it answers false; whether it never did.
template <class Take>
MK_HOST_DEVICE inline bool deal_parts(std::uint32_t chunks, std::uint32_t parts,
                                      std::uint32_t index, std::uint32_t blocks, Take&& take) {
  for (std::uint32_t step = index; step < chunks * parts; step += blocks) {
    if (!take(step / parts, Part{step % parts, parts})) return false;
  }
  return true;
}

/// Of bytes: about equal parts, which begin at multiples of the copy engine's 16 bytes; the last
/// ones of few bytes are empty.
MK_HOST_DEVICE constexpr ByteRange part_of(const ByteRange& range, Part part) {
  if (part.count == 1) return range;
  constexpr std::uint32_t kStep = 16;
  const auto most = static_cast<std::uint32_t>(round_up_to(div_up(range.bytes, part.count), kStep));
  const std::uint64_t first = std::uint64_t{part.index} * most;
  if (first >= range.bytes) return {range.begin + range.bytes, 0};
  const auto left = static_cast<std::uint32_t>(range.bytes - first);
  return {range.begin + first, left < most ? left : most};
}

/// Part `rows` of the rows of each of the tiles.
struct TilesPart {
  TileRange tiles;
  Part rows;
};

/// Of a chunk's tiles, of which a whole chunk has `per_chunk`: all; or, of fewer parts than that,
/// several tiles each; or, of more, a part of one. Some parts are none.
MK_HOST_DEVICE constexpr TilesPart part_of(const TileRange& tiles, std::uint32_t per_chunk,
                                           Part part) {
  const std::uint32_t of_tile = part.count > per_chunk ? part.count / per_chunk : 1;
  const std::uint32_t tiles_each = div_up(per_chunk, part.count);
  const std::uint32_t first = part.index / of_tile * tiles_each;
  const std::uint32_t count = tiles.end - tiles.begin;
  if (first >= count) return {{tiles.end, tiles.end}, {}};
  const std::uint32_t left = count - first;
  const std::uint32_t begin = tiles.begin + first;
  return {{begin, begin + (left < tiles_each ? left : tiles_each)},
          {part.index % of_tile, of_tile}};
}

}  // namespace mk::kernels
