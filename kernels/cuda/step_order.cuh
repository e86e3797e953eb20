/// \file
/// Tile orders given by a schedule: worker w takes steps w, w + workers, ...; and what comes with
/// those in which a rank adds up its own tiles.
#pragma once

#include <cstdint>

#include "kernels/comm/own_steps.h"
#include "kernels/cuda/gemm_policies.cuh"
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

/// The same of a rank that may add up its own tiles as it computes them. `Params` has `own`, too:
/// OwnSteps, as it is where it does not.
class OwnStepCount : public StepCount {
 public:
  template <class Params>
  __device__ OwnStepCount(const Params& params, int worker, int workers)
      : StepCount(params, worker, workers), own_(params.own) {}

  __device__ bool next(Tile* /*tile*/) { return take(&step_); }
  __device__ bool adds() const { return own_.is_own(step_); }

 protected:
  const OwnSteps& own_;
  std::uint32_t step_ = 0;
};

/// A part of the parameters of a gate whose order adds: the others' partials of this rank's own
/// tiles.
struct PartialsOfOwn {
  std::uint32_t partials;  ///< of a tile: one of each local rank
  std::uint32_t own;       ///< this rank's
  CUtensorMap slots;       ///< where they lie here, [source][tile]

  __device__ void load(std::uint32_t source, int tile, int row, int column, std::uint64_t* full,
                       std::uint64_t hint, void* to) const {
    cute::SM90_TMA_LOAD_4D::copy(&slots, full, hint, to, column, row, tile,
                                 static_cast<int>(source));
  }
};

}  // namespace mk::kernels::cuda
