/// \file
/// The compute role of GEMM + ReduceScatter as seams of the GEMM core: tiles in the schedule's
/// order, stored as packed tiles at the owner of their shard, each shown by its tile_ready flag.
#pragma once

#include "kernels/cuda/block_gate.cuh"
#include "kernels/cuda/gemm_rs/launch_arguments.h"
#include "kernels/cuda/packed_store.cuh"
#include "kernels/cuda/step_order.cuh"
#include "kernels/gemm_rs/block.h"
#include "kernels/gemm_rs/schedule.h"

namespace mk::kernels::cuda {

/// This rank's tiles in the order of gemm_rs/schedule.h. `Tile::m` is the shard (its rank), `n` the
/// tile of it.
class GemmRsOrder : public StepCount {
 public:
  struct Params {
    GemmRsSchedule schedule;
    World world;
    std::uint32_t tiles;
  };
  using Count = StepCount;

  __device__ GemmRsOrder(const Params& params, int worker, int workers)
      : StepCount(params, worker, workers), params_(params) {}

  __device__ bool next(Tile* tile) {
    std::uint32_t step;
    if (!take(&step)) return false;
    const GemmRsSchedule::Tile found =
        params_.schedule.tile_at(params_.world.node, params_.world.local, step);
    tile->m = static_cast<int>(found.node * params_.world.locals + found.local);
    tile->n = static_cast<int>(found.tile);
    return true;
  }
  __device__ Tile origin(Tile tile) const {
    const auto shard = static_cast<std::uint32_t>(tile.m);
    const TileRect rect = params_.schedule.grid(shard).rect(static_cast<std::uint32_t>(tile.n));
    return {static_cast<int>(params_.schedule.rows(shard).first + rect.row),
            static_cast<int>(rect.column)};
  }

 private:
  const Params& params_;
};

/// A tile waits until its owner has read this rank's slots of the last launch; where compute stores
/// into staging, until the daemon has read what was there.
class GemmRsGate {
 public:
  struct Params {
    World world;
  };
  using Shared = BlockGateShared<GemmRsLaunch, GemmRsBlock<GateExecutor>>;

  __device__ GemmRsGate(const Params& params, Shared& shared)
      : locals_(params.world.locals),
        block_(params.world.size() > 1 ? &shared.make_block() : nullptr) {}

  __device__ int wait(int shard, int /*tile*/, int /*k_block*/) {
    if (block_ == nullptr) return kAllReady;
    const std::uint32_t owner = static_cast<std::uint32_t>(shard) % locals_;
    if ((free_ >> owner & 1) != 0) return kAllReady;
    if (locals_ > 1) {
      // One look at all of them takes as long as at one.
      free_ |= block_->locals_finished(block_->epoch - 1);
      if ((free_ >> owner & 1) != 0) return kAllReady;
    }
    free_ |= 1u << owner;
    const bool free = locals_ > 1 ? block_->await_finished(owner, block_->epoch - 1)
                                  : block_->await_staging_free();
    // The launch has failed: the store then shows nothing.
    if (!free) block_ = nullptr;
    return kAllReady;
  }

 private:
  std::uint32_t locals_;
  GemmRsBlock<GateExecutor>* block_;
  std::uint32_t free_ = 0;  ///< a bit for each owner whose slots are
};

/// A tile's slot at its owner; one rank of a node: its place in staging, or among the kept; one
/// rank alone: in C.
struct GemmRsPlaces {
  using Params = PlaceParams<GemmRsSchedule, GemmRsPlaceMaps>;

  static __device__ TilePlace place(const Params& params, Tile tile, std::uint32_t epoch) {
    const GemmRsSchedule& schedule = params.schedule;
    const World& world = params.world;
    const auto shard = static_cast<std::uint32_t>(tile.m);
    const auto number = static_cast<std::uint32_t>(tile.n);
    const std::uint32_t node = shard / world.locals;
    const std::uint32_t owner = shard - node * world.locals;
    const TileGrid& grid = schedule.grid(shard);
    const int which = &grid == &schedule.large_grid() ? 0 : 1;
    TilePlace place{};
    place.tile = tile.n;
    place.rows = static_cast<int>(grid.tile_rows());
    place.columns = static_cast<int>(grid.tile_cols());
    place.ready = reinterpret_cast<std::uint32_t*>(params.workspaces[owner] +
                                                   schedule.tile_ready(world.local, node, number));
    if (world.locals > 1) {
      place.map = &params.maps.slots[owner][which];
      place.plane = static_cast<int>(node);
    } else if (node != world.node) {
      place.map = &params.maps.staging[bank_of(epoch, params.banks)][which];
      place.plane = static_cast<int>(peer_index(world.node, node));
    } else if (world.nodes > 1) {
      place.map = &params.maps.kept[which];
    } else {
      const TileRect rect = grid.rect(number);
      place.map = &params.maps.out;
      place.tile = -1;
      place.row = static_cast<int>(rect.row);
      place.column = static_cast<int>(rect.column);
    }
    return place;
  }
};

}  // namespace mk::kernels::cuda
