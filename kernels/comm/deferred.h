/// \file
/// Deferred accumulate: when a worker of one of two ranks adds the other rank's partial to a tile
/// that it computes itself. Compiles for host and device.
///
/// Both ranks go through the tiles in the same order, by pairs: one tile of each rank, and at the
/// end perhaps single tiles of the rank that has more. A worker accumulates a tile of its own when
/// it has computed its next one, or has no more. The other rank's partial has had the time of a
/// tile or two to come by then, so as a rule nobody waits for it.
///
/// Nobody waits in a circle. Say a worker waits for the other's partial of its tile of pair i. The
/// worker that is to compute that partial waits, too, for a tile of pair j. It has computed a tile
/// of a later pair than j, and not yet that of pair i, which therefore comes later still: j < i. So
/// along a chain of waiting workers the pairs go down, and the last one waits for nobody.
#pragma once

#include "shm/platform.h"

namespace mk::kernels {

/// One block's part in a launch. `Tile`: what names a tile.
template <class Tile>
class DeferredAccumulate {
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
