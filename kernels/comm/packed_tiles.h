/// \file
/// The tiles that one rank sends to another, packed one after the other, and cut into the chunks in
/// which they cross the network. Compiles for host and device.
#pragma once

#include <cstdint>

#include "kernels/comm/launch_record.h"
#include "kernels/comm/part.h"
#include "kernels/comm/tile_grid.h"
#include "shm/platform.h"

namespace mk::kernels {

/// `tiles` tiles of `tile_bytes` bytes each. Chunk c holds tiles [c*P, (c+1)*P), P =
/// tiles_per_chunk. In a bank (staging, receive) a BankHeader is in front; chunk 0 carries it.
class PackedTiles {
 public:
  MK_HOST_DEVICE PackedTiles(std::uint32_t tiles, std::uint64_t tile_bytes,
                             const Divisor& tiles_per_chunk)
      : tiles_(tiles), tiles_per_chunk_(tiles_per_chunk), tile_bytes_(tile_bytes) {}

  /// As many as fit into `chunk_bytes`; one at least.
  MK_HOST_DEVICE static Divisor per_chunk(std::uint64_t tile_bytes, std::uint32_t chunk_bytes) {
    if (tile_bytes == 0 || tile_bytes > chunk_bytes) return Divisor(1);
    return Divisor(static_cast<std::uint32_t>(chunk_bytes / tile_bytes));
  }

  MK_HOST_DEVICE std::uint32_t tiles() const { return tiles_; }
  MK_HOST_DEVICE std::uint32_t tiles_per_chunk() const { return tiles_per_chunk_.value(); }

  /// Of a whole chunk, without a header.
  MK_HOST_DEVICE std::uint64_t chunk_bytes() const { return tiles_per_chunk() * tile_bytes_; }

  /// At least one, which then holds only its bank's header.
  MK_HOST_DEVICE std::uint32_t chunks() const {
    const std::uint32_t count = div_up(tiles_, tiles_per_chunk_);
    return count == 0 ? 1 : count;
  }
  MK_HOST_DEVICE std::uint32_t chunk_of(std::uint32_t tile) const {
    return tile / tiles_per_chunk_;
  }
  MK_HOST_DEVICE TileRange chunk_tiles(std::uint32_t chunk) const {
    TileRange range;
    const std::uint32_t most = tiles_per_chunk();
    range.begin = chunk * most;
    range.end = tiles_ - range.begin < most ? tiles_ : range.begin + most;
    return range;
  }
  MK_HOST_DEVICE TilesPart chunk_part(std::uint32_t chunk, Part part) const {
    return part_of(chunk_tiles(chunk), tiles_per_chunk(), part);
  }
  /// Where a tile lies behind the first one.
  MK_HOST_DEVICE std::uint64_t offset(std::uint32_t tile) const { return tile * tile_bytes_; }
  /// Where a tile lies in a bank.
  MK_HOST_DEVICE std::uint64_t in_bank(std::uint32_t tile) const {
    return kBankHeaderBytes + offset(tile);
  }
  /// What of a bank the chunk's command carries.
  MK_HOST_DEVICE ByteRange chunk_range(std::uint32_t chunk) const {
    const TileRange tiles = chunk_tiles(chunk);
    ByteRange range;
    range.begin = chunk == 0 ? 0 : in_bank(tiles.begin);
    range.bytes = static_cast<std::uint32_t>(in_bank(tiles.end) - range.begin);
    return range;
  }
  /// All chunks of it: what crosses the network.
  MK_HOST_DEVICE std::uint64_t bank_bytes() const { return in_bank(tiles_); }

 private:
  std::uint32_t tiles_;
  Divisor tiles_per_chunk_;
  std::uint64_t tile_bytes_;
};

}  // namespace mk::kernels
