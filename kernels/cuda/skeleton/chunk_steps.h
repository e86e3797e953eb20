/// \file
/// How a rank's groups share its chunks: in how many parts each is summed or copied (comm/part.h),
/// and in which steps the groups take them. Arithmetic for host and device.
#pragma once

#include <cstdint>

#include "kernels/comm/part.h"
#include "shm/platform.h"

namespace mk::kernels::cuda {

/// Where the parts of chunks are counted, in each launch: so many places.
inline constexpr std::uint32_t kPartPlaces = 2048;

/// That of a chunk's parts: each of up to kPartPlaces chunks, or, of more, each of the first and of
/// the last half as many, has one of its own.
MK_HOST_DEVICE constexpr std::uint32_t place_of_parts(std::uint32_t chunk) {
  constexpr std::uint32_t kHalf = kPartPlaces / 2;
  return chunk < kHalf ? chunk : kHalf + chunk % kHalf;
}

/// Of `chunks` chunks of `parts` parts those that go to the network before any to the local ranks
/// (gather::Sharing). They are enough to keep it busy until the others follow, which go to both at
/// once. Their parts have places of their own behind the others'.
MK_HOST_DEVICE constexpr std::uint32_t network_first(std::uint32_t chunks, std::uint32_t parts) {
  constexpr std::uint32_t kFirst = 24;
  const std::uint32_t places = chunks < kPartPlaces ? kPartPlaces - chunks : 0;
  const std::uint32_t most = parts == 1 || places > kFirst ? kFirst : places;
  return chunks < most ? chunks : most;
}

/// The chunks of a role as steps, which groups take in their order: one run of chunks after the
/// other, each chunk of a run in as many parts.
struct ChunkSteps {
  struct Run {
    std::uint32_t chunks = 0;
    std::uint32_t parts = 1;
  };
  static constexpr std::uint32_t kRuns = 5;
  Run runs[kRuns];

  struct Step {
    std::uint32_t chunk = 0;
    Part part;
  };

  MK_HOST_DEVICE constexpr std::uint32_t count() const {
    std::uint32_t steps = 0;
    for (const Run& run : runs) steps += run.chunks * run.parts;
    return steps;
  }
  /// The `step`-th of count().
  MK_HOST_DEVICE constexpr Step at(std::uint32_t step) const {
    std::uint32_t chunk = 0;
    std::uint32_t at = 0;
    for (; at + 1 < kRuns && step >= runs[at].chunks * runs[at].parts; ++at) {
      step -= runs[at].chunks * runs[at].parts;
      chunk += runs[at].chunks;
    }
    const std::uint32_t parts = runs[at].parts;
    return {chunk + step / parts, {step % parts, parts}};
  }
};

/// Chunks of a role in a launch that are few: groups share in each of them.
inline constexpr std::uint32_t kFewChunks = 128;

/// Chunks, of `per_chunk` tiles, that are some 96 tiles: what is summed at one time at an end of a
/// launch.
MK_HOST_DEVICE constexpr std::uint32_t end_tiles_chunks(std::uint32_t per_chunk) {
  constexpr std::uint32_t kTiles = 96;
  const std::uint32_t end = kTiles / per_chunk;
  return end == 0 ? 1 : end < kFewChunks / 2 ? end : kFewChunks / 2;
}

/// Chunks that groups share in at the end of the launch: all, if they are few. A role that waits
/// for the last one would else wait until one group has summed all its tiles.
MK_HOST_DEVICE constexpr std::uint32_t end_chunks(std::uint32_t chunks, std::uint32_t per_chunk) {
  return chunks <= kFewChunks ? chunks : end_tiles_chunks(per_chunk);
}

/// Parts of a tile that groups sum separately within the node, at most. In sixteen, a group's part
/// of eight sources is what its threads load at one time.
inline constexpr std::uint32_t kTilePartsMax = 16;
/// The same where groups sum so many tiles at a time: few tiles come all at the end, when every
/// group of the GPU has time.
MK_HOST_DEVICE constexpr std::uint32_t tile_parts(std::uint32_t tiles) {
  constexpr std::uint32_t kGroupsWanted = 384;
  std::uint32_t parts = kTilePartsMax;
  while (parts > 1 && tiles * parts > kGroupsWanted) parts /= 2;
  return parts;
}

/// A rank's chunks of `per_chunk` tiles that all groups of the GPU sum, `groups` of them from the
/// start. Of few chunks a group takes each tile or part of a tile, of many so the last ones. The
/// first `onward` of them go to the network, which waits for the first one, and then for each after
/// that. The very first is summed in as many parts as there are groups. Those after it, of many,
/// are summed tile by tile, then half by half. (Two dozen groups that all sum a whole chunk of half
/// a megabyte, which takes them 140 µs, have twenty-four at the end of that, and none before: the
/// network takes 10 µs for one.)
MK_HOST_DEVICE constexpr ChunkSteps sum_steps(std::uint32_t chunks, std::uint32_t per_chunk,
                                              std::uint32_t onward, std::uint32_t groups) {
  const std::uint32_t tail = end_chunks(chunks, per_chunk);
  const std::uint32_t tail_parts = per_chunk * tile_parts(tail * per_chunk);
  const std::uint32_t body = chunks - tail;
  std::uint32_t first_parts = per_chunk * 4;
  while (first_parts > per_chunk && first_parts > groups) first_parts /= 2;
  if (body == 0) {
    const std::uint32_t head = onward != 0 && first_parts > tail_parts ? 1 : 0;
    return {{{head, first_parts}, {chunks - head, tail_parts}}};
  }
  const std::uint32_t sent = onward < body ? onward : body;
  const std::uint32_t head = sent != 0 ? 1 : 0;
  const std::uint32_t next = end_tiles_chunks(per_chunk);
  const std::uint32_t by_tile = next < sent - head ? next : sent - head;
  const std::uint32_t halves = per_chunk > 1 && chunks <= kPartPlaces ? 2 : 1;
  return {{{head, first_parts},
           {by_tile, per_chunk},
           {sent - head - by_tile, halves},
           {body - sent, 1},
           {tail, tail_parts}}};
}

/// Chunks that come over the network one by one, and are summed by `groups` groups: the more parts,
/// the more of them sum the last one, as long as each has few in all.
MK_HOST_DEVICE constexpr ChunkSteps arrival_steps(std::uint32_t chunks, std::uint32_t per_chunk,
                                                  std::uint32_t groups) {
  constexpr std::uint32_t kRounds = 4;
  constexpr std::uint32_t kMost = 8;  // of a tile
  const std::uint32_t tail = end_chunks(chunks, per_chunk);
  std::uint32_t parts = kMost;
  while (parts > 1 && tail * per_chunk * parts > kRounds * groups) parts /= 2;
  return {{{chunks - tail, 1}, {tail, per_chunk * parts}}};
}

/// Parts in which `groups` groups copy each of `chunks` chunks, which they take in their order: so
/// many that the first chunks are there long before the last. (With whole ones each group has one
/// of its own under way, and as many as there are groups come at one time.) `onward`: over nodes,
/// where the network waits for them, or they have come by it. `targets`: ranks of the node that get
/// them. To one rank fewer and larger parts are quicker, as each costs some microseconds besides
/// its bytes.
MK_HOST_DEVICE constexpr std::uint32_t copy_parts(std::uint32_t chunks, std::uint32_t chunk_bytes,
                                                  std::uint32_t groups, bool onward,
                                                  std::uint32_t targets) {
  constexpr std::uint32_t kRounds = 4;  // of parts for each group
  constexpr std::uint32_t kKib = 1024;
  if (chunks == 0 || chunks > (onward ? kPartPlaces : kFewChunks)) return 1;
  const std::uint32_t least = onward ? 8 * kKib : (targets == 1 ? 48 : 24) * kKib;
  const std::uint32_t most = chunk_bytes / least;
  const std::uint32_t for_all = kRounds * groups / chunks;
  // Over nodes large chunks have 512 KiB.
  const std::uint32_t in_order = onward ? chunk_bytes / ((targets <= 1 ? 256 : 64) * kKib) : 1;
  const std::uint32_t wanted = for_all > in_order ? for_all : in_order;
  const std::uint32_t parts = wanted < most ? wanted : most;
  return parts == 0 ? 1 : parts;
}

}  // namespace mk::kernels::cuda
