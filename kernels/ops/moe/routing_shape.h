/// \file
/// The numbers that a routing plan is made from, and the parts that its work is cut into. Compiles
/// for host and device.
#pragma once

#include <cstdint>

#include "kernels/comm/shard.h"
#include "kernels/comm/types.h"
#include "kernels/comm/world.h"
#include "shm/platform.h"

namespace mk::kernels {

/// The experts of rank `world.rank()`, of `experts` in all; with fewer experts than ranks some have
/// none.
MK_HOST_DEVICE constexpr ShardRange experts_of(std::uint32_t experts, const World& world) {
  return shard_of(experts, world.size(), world.rank());
}

/// The numbers a routing plan is made from.
struct RoutingShape {
  World world;
  std::uint32_t experts = 0;  ///< of all ranks
  std::uint32_t top_k = 0;
  std::uint32_t tokens_max = 0;  ///< of one rank
  std::uint32_t rows_max = 0;    ///< output rows there is room for
  std::uint32_t tile_m = 0;      ///< rows of a tile, at most
  std::uint32_t row_pad = 0;     ///< packed tiles have a multiple of this many rows; divides tile_m
  /// The sources of one class arrive side by side, each from its first token on; tiles go by so
  /// many steps of that. The more there are, the sooner there is work. But tiles of an expert,
  /// which share its weights, are the farther apart.
  std::uint32_t steps = 16;

  /// Tokens of one part of a routing table.
  static constexpr std::uint32_t kPartTokens = 256;

  MK_HOST_DEVICE constexpr std::uint32_t parts_of_source() const {
    return div_up(tokens_max, kPartTokens);
  }
  /// Parts are numbered in the order of their expected arrival: by the hops of their sources, then
  /// by their place in a table, then by source.
  MK_HOST_DEVICE constexpr std::uint32_t parts() const { return world.size() * parts_of_source(); }
  MK_HOST_DEVICE constexpr std::uint32_t hops_of(std::uint32_t part) const {
    return part / (world.locals * parts_of_source());
  }
  MK_HOST_DEVICE constexpr std::uint32_t place_of(std::uint32_t part) const {
    return part / world.locals % parts_of_source();
  }
  /// As GatherSchedule::origin_at counts them.
  MK_HOST_DEVICE constexpr std::uint32_t source_of(std::uint32_t part) const {
    return hops_of(part) * world.locals + part % world.locals;
  }
  /// Of those whose rows have the key (see `keys`); that of keys() is beyond the last.
  MK_HOST_DEVICE constexpr std::uint32_t first_part_of(std::uint32_t key) const {
    const std::uint32_t places = parts_of_source();
    const std::uint32_t place = (key % steps * places + steps - 1) / steps;
    return (key / steps * places + place) * world.locals;
  }
  /// Experts of any rank, at most.
  MK_HOST_DEVICE constexpr std::uint32_t experts_here_max() const {
    return shard_rows_max(experts, world.size());
  }
  /// Of each expert's tiles only the last may be less than half full.
  MK_HOST_DEVICE constexpr std::uint64_t tiles_max() const {
    return rows_max / (tile_m / 2) + std::uint64_t{experts_here_max()};
  }
  MK_HOST_DEVICE constexpr std::uint64_t packed_rows_max() const {
    return rows_max + tiles_max() * (row_pad - 1);
  }
  /// Tiles are computed by class, and by step within it: these are their keys.
  MK_HOST_DEVICE constexpr std::uint32_t keys() const { return world.nodes * steps; }
  /// Words of Arrays::counts: a part's counts, and its first fault.
  MK_HOST_DEVICE constexpr std::uint64_t count_words() const {
    return std::uint64_t{parts()} * (experts_here_max() + 1);
  }
  /// Words of Arrays::places: for each key, and for the packed rows, one of each expert and a sum.
  MK_HOST_DEVICE constexpr std::uint64_t place_words() const {
    return (std::uint64_t{keys()} + 1) * (experts_here_max() + 1);
  }
};

}  // namespace mk::kernels
