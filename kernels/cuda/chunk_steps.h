/// \file
/// How a rank's groups share its chunks: in how many parts each is summed or copied (comm/part.h),
/// and in which steps the groups take them. Arithmetic for host and device.
#pragma once

#include <cstdint>

#include "kernels/comm/part.h"
#include "shm/platform.h"

namespace mk::kernels::cuda {

/// Chunks of a role in a launch that groups share in, at most.
inline constexpr std::uint32_t kPartedChunksMax = 128;

/// Where the parts of a chunk are counted, below kPartedChunksMax: each of up to so many chunks,
/// or, of more, each of the first and of the last half as many, has a place of its own.
MK_HOST_DEVICE constexpr std::uint32_t place_of_parts(std::uint32_t chunk) {
  constexpr std::uint32_t kHalf = kPartedChunksMax / 2;
  return chunk < kHalf ? chunk : kHalf + chunk % kHalf;
}

/// Whether the parts of twice so many chunks have a place for each chunk: of a role that takes them
/// twice (gather::Sharing).
MK_HOST_DEVICE constexpr bool has_places_twice(std::uint32_t chunks) {
  return 2 * chunks <= kPartedChunksMax;
}

/// The chunks of a role as steps, which groups take in their order: of the `head` first chunks and
/// of the last ones `parts` each, of the `whole` chunks between one each.
struct ChunkSteps {
  std::uint32_t chunks = 0;
  std::uint32_t parts = 1;
  std::uint32_t head = 0;
  std::uint32_t whole = 0;

  struct Step {
    std::uint32_t chunk = 0;
    Part part;
  };

  MK_HOST_DEVICE constexpr std::uint32_t count() const { return (chunks - whole) * parts + whole; }
  /// The `step`-th of count().
  MK_HOST_DEVICE constexpr Step at(std::uint32_t step) const {
    const std::uint32_t of_head = head * parts;
    if (step < of_head) return {step / parts, {step % parts, parts}};
    if (step < of_head + whole) return {head + step - of_head, {}};
    const std::uint32_t parted = step - whole;
    return {whole + parted / parts, {parted % parts, parts}};
  }
};

/// Chunks, of `per_chunk` tiles, that are shared in at an end of the launch: all, if they are few.
/// Whoever waits for the first or the last one would else wait until one group has summed all its
/// tiles.
MK_HOST_DEVICE constexpr std::uint32_t end_chunks(std::uint32_t chunks, std::uint32_t per_chunk) {
  constexpr std::uint32_t kTiles = 96;
  if (chunks <= kPartedChunksMax) return chunks;
  const std::uint32_t end = kTiles / per_chunk;
  return end == 0 ? 1 : end < kPartedChunksMax / 2 ? end : kPartedChunksMax / 2;
}

/// Parts of a tile that groups sum separately, at most.
inline constexpr std::uint32_t kTilePartsMax = 8;
/// The same where groups sum so many tiles at a time: few tiles come all at the end, when every
/// group of the GPU has time.
MK_HOST_DEVICE constexpr std::uint32_t tile_parts(std::uint32_t tiles) {
  constexpr std::uint32_t kGroupsWanted = 384;
  std::uint32_t parts = kTilePartsMax;
  while (parts > 1 && tiles * parts > kGroupsWanted) parts /= 2;
  return parts;
}

/// A rank's chunks of `per_chunk` tiles that all groups of the GPU sum: few chunks a group for each
/// tile or part of a tile, of many so the last ones and, where they go `onward` to the network,
/// which waits for them, the first ones.
MK_HOST_DEVICE constexpr ChunkSteps sum_steps(std::uint32_t chunks, std::uint32_t per_chunk,
                                              bool onward) {
  const std::uint32_t tail = end_chunks(chunks, per_chunk);
  const std::uint32_t head = chunks <= kPartedChunksMax || !onward ? 0 : tail;
  return {chunks, per_chunk * tile_parts(tail * per_chunk), head, chunks - head - tail};
}

/// What comes over the network, chunk by chunk, and is summed by `groups` groups: the more parts,
/// the more of them sum the last one, as long as each has few in all.
MK_HOST_DEVICE constexpr ChunkSteps arrival_steps(std::uint32_t chunks, std::uint32_t per_chunk,
                                                  std::uint32_t groups) {
  constexpr std::uint32_t kRounds = 4;
  const std::uint32_t tail = end_chunks(chunks, per_chunk);
  std::uint32_t parts = kTilePartsMax;
  while (parts > 1 && tail * per_chunk * parts > kRounds * groups) parts /= 2;
  return {chunks, per_chunk * parts, 0, chunks - tail};
}

/// Parts in which `groups` groups copy each of `chunks` chunks, which they take in their order: so
/// many that the first chunks are there long before the last. `onward`: the network waits for them.
/// `targets`: ranks of the node that get them; to one, fewer and larger parts are quicker, as each
/// costs some microseconds besides its bytes.
MK_HOST_DEVICE constexpr std::uint32_t copy_parts(std::uint32_t chunks, std::uint32_t chunk_bytes,
                                                  std::uint32_t groups, bool onward,
                                                  std::uint32_t targets) {
  constexpr std::uint32_t kRounds = 4;  // of parts for each group
  if (chunks > kPartedChunksMax || chunks == 0) return 1;
  const std::uint32_t least = onward ? 8 : targets == 1 ? 48 : 24;  // KiB
  const std::uint32_t most = chunk_bytes / (least * 1024);
  const std::uint32_t wanted = kRounds * groups / chunks;
  const std::uint32_t parts = wanted < most ? wanted : most;
  return parts == 0 ? 1 : parts;
}

}  // namespace mk::kernels::cuda
