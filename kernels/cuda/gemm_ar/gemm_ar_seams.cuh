/// \file
/// The compute role of GEMM + AllReduce as seams of the GEMM core: tiles in the schedule's order,
/// stored as packed tiles at their owner, each shown by its tile_ready flag.
#pragma once

#include "kernels/cuda/block_gate.cuh"
#include "kernels/cuda/gemm_ar/launch_arguments.h"
#include "kernels/cuda/packed_store.cuh"
#include "kernels/cuda/step_order.cuh"
#include "kernels/gemm_ar/block.h"
#include "kernels/gemm_ar/schedule.h"

namespace mk::kernels::cuda {

/// This rank's tiles in the order of gemm_ar/schedule.h. `Tile::m` is the tile's number.
class GemmArOrder : public StepCount {
 public:
  struct Params {
    GemmArSchedule schedule;
    std::uint32_t local;
    std::uint32_t tiles;
  };
  using Count = StepCount;

  __device__ GemmArOrder(const Params& params, int worker, int workers)
      : StepCount(params, worker, workers), params_(params) {}

  __device__ bool next(Tile* tile) {
    std::uint32_t step;
    if (!take(&step)) return false;
    tile->m = static_cast<int>(params_.schedule.tile_at(params_.local, step));
    tile->n = 0;
    return true;
  }
  __device__ Tile origin(Tile tile) const {
    const TileRect rect = params_.schedule.rect(static_cast<std::uint32_t>(tile.m));
    return {static_cast<int>(rect.row), static_cast<int>(rect.column)};
  }

 private:
  const Params& params_;
};

/// Several local ranks: a tile waits for nothing. One of several nodes stores into its staging
/// bank, when the daemon has read what was there.
class GemmArGate {
 public:
  struct Params {
    bool into_staging;
    int k_blocks;
  };
  using Shared = BlockGateShared<GemmArLaunch, GemmArBlock<GateExecutor>>;

  __device__ GemmArGate(const Params& params, Shared& shared)
      : k_blocks_(params.k_blocks), block_(params.into_staging ? &shared.make_block() : nullptr) {}

  /// As only the store has to wait, the first tile's loads begin meanwhile, all but the last.
  __device__ int wait(int, int, int k_block) {
    if (block_ == nullptr) return kAllReady;
    if (k_block + 1 < k_blocks_) return k_blocks_ - 1;
    // If not, the launch has failed: the store then shows nothing.
    block_->await_staging_free();
    block_ = nullptr;
    return kAllReady;
  }

 private:
  int k_blocks_;
  GemmArBlock<GateExecutor>* block_;
};

/// A tile's slot at its owner; one rank of a node: its place in staging; one rank alone: in C.
struct GemmArPlaces {
  using Params = PlaceParams<GemmArSchedule, GemmArPlaceMaps>;

  static __device__ TilePlace place(const Params& params, Tile tile, std::uint32_t epoch) {
    const auto number = static_cast<std::uint32_t>(tile.m);
    const GemmArSchedule& schedule = params.schedule;
    const std::uint32_t owner = schedule.owner(number);
    const std::uint32_t owned = schedule.owned_index(number);
    TilePlace place{};
    place.tile = static_cast<int>(owned);
    place.rows = static_cast<int>(schedule.tile_rows());
    place.columns = static_cast<int>(schedule.tile_cols());
    place.ready = reinterpret_cast<std::uint32_t*>(params.workspaces[owner] +
                                                   schedule.tile_ready(params.world.local, owned));
    if (params.world.locals > 1) {
      place.map = &params.maps.slots[owner];
    } else if (params.world.nodes > 1) {
      place.map = &params.maps.staging[bank_of(epoch, params.banks)];
    } else {
      const TileRect rect = schedule.rect(number);
      place.map = &params.maps.out;
      place.tile = -1;
      place.row = static_cast<int>(rect.row);
      place.column = static_cast<int>(rect.column);
    }
    return place;
  }
};

}  // namespace mk::kernels::cuda
