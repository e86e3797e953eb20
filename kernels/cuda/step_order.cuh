/// \file
/// Tile orders given by a schedule: worker w takes steps w, w + workers, ....
#pragma once

#include <cstdint>

#include "kernels/cuda/tile.h"

namespace mk::kernels::cuda {

/// Counts steps without knowing their tiles. `Params` has `tiles`, their number.
class StepCount {
 public:
  template <class Params>
  __device__ StepCount(const Params& params, int worker, int workers)
      : step_(static_cast<std::uint32_t>(worker)),
        workers_(static_cast<std::uint32_t>(workers)),
        tiles_(params.tiles) {}

  __device__ bool next(Tile* /*tile*/) {
    std::uint32_t step;
    return take(&step);
  }

 protected:
  __device__ bool take(std::uint32_t* step) {
    if (step_ >= tiles_) return false;
    *step = step_;
    step_ += workers_;
    return true;
  }

 private:
  std::uint32_t step_;
  std::uint32_t workers_;
  std::uint32_t tiles_;
};

}  // namespace mk::kernels::cuda
