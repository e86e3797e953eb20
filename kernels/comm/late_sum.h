/// \file
/// How a block of a rank that sums its own tiles as it computes them (one node of two ranks) goes
/// about it: one of them late. Compiles for host and device.
///
/// Both ranks go through the tiles in the same order, by pairs (one tile of each rank's; at the end
/// perhaps by single tiles of the rank that has more), and a block sums a tile of its own when it
/// has computed its next one, or has no more: so the other rank's partial has had the time of a
/// tile or two to come, and nobody need wait for it as a rule.
///
/// Nor does anybody wait in a circle. Say a block waits for the other's partial of its tile of pair
/// i. The block that is to compute that waits, too, for a tile of pair j: it has computed a tile of
/// a later pair than j, and not yet that of pair i, which therefore comes later still: j < i. So
/// along a chain of waiting blocks the pairs go down, and the last one waits for nobody.
#pragma once

#include "shm/platform.h"

namespace mk::kernels {

/// One block's part in a launch. `Tile`: what names a tile.
template <class Tile>
class LateSum {
 public:
  /// A tile of this rank's own is computed: `sum(tile)` of the one before. False: that failed.
  template <class Sum>
  MK_HOST_DEVICE bool next(const Tile& tile, Sum&& sum) {
    if (!end(sum)) return false;
    tile_ = tile;
    any_ = true;
    return true;
  }
  /// There are no more.
  template <class Sum>
  MK_HOST_DEVICE bool end(Sum&& sum) {
    return !any_ || sum(tile_);
  }

 private:
  Tile tile_{};
  bool any_ = false;
};

}  // namespace mk::kernels
