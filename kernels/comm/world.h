/// \file
/// Where a rank stands in its job: N nodes of L local ranks, node-major.
#pragma once

#include <cstdint>

#include "shm/platform.h"

namespace mk::kernels {

struct World {
  std::uint32_t nodes = 1;
  std::uint32_t locals = 1;  ///< ranks per node
  std::uint32_t node = 0;    ///< this rank's node
  std::uint32_t local = 0;   ///< this rank's index on its node: its rail

  MK_HOST_DEVICE constexpr std::uint32_t size() const { return nodes * locals; }
  MK_HOST_DEVICE constexpr std::uint32_t rank() const { return node * locals + local; }
  /// The rank of this rail on `other_node`.
  MK_HOST_DEVICE constexpr std::uint32_t rail_peer(std::uint32_t other_node) const {
    return other_node * locals + local;
  }
  friend constexpr bool operator==(const World&, const World&) = default;
};

}  // namespace mk::kernels
