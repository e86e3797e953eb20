/// \file
/// The compute role of GEMM + ReduceScatter as seams of the GEMM core: tiles in the schedule's
/// order, stored as packed tiles at the owner of their shard, each shown by its tile_ready flag;
/// this rank's own perhaps straight into C, where the other's partial is added.
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
    bool sums_own;  ///< GemmRsLaunch::sums_own_tiles
  };
  using Count = StepCount;

  __device__ GemmRsOrder(const Params& params, int worker, int workers)
      : StepCount(params, worker, workers), params_(params) {}

  __device__ bool next(Tile* tile) {
    std::uint32_t step;
    if (!take(&step)) return false;
    const World& world = params_.world;
    const GemmRsSchedule::Tile found = params_.schedule.tile_at(world.node, world.local, step);
    adds_ = params_.sums_own && found.local == world.local;
    tile->m = static_cast<int>(found.node * world.locals + found.local);
    tile->n = static_cast<int>(found.tile);
    return true;
  }
  __device__ bool adds() const { return adds_; }
  __device__ Tile origin(Tile tile) const {
    const auto shard = static_cast<std::uint32_t>(tile.m);
    const TileRect rect = params_.schedule.grid(shard).rect(static_cast<std::uint32_t>(tile.n));
    return {static_cast<int>(params_.schedule.rows(shard).first + rect.row),
            static_cast<int>(rect.column)};
  }

 private:
  const Params& params_;
  bool adds_ = false;
};

/// A tile waits until its owner has read this rank's slots of the last launch; where compute stores
/// into staging, until the daemon has read what was there.
class GemmRsGate {
 public:
  struct Params {
    World world;
    int k_blocks;
    WaitsDone waits_done;
  };
  using Shared = BlockGateShared<GemmRsLaunch, GemmRsBlock>;

  __device__ GemmRsGate(const Params& params, Shared& shared)
      : params_(params),
        shared_(shared),
        locals_(params.world.locals),
        block_(params.world.size() > 1 ? &shared.make_block() : nullptr) {}

  /// Only its store has to wait, so the tile's loads begin meanwhile, all but the last.
  __device__ int wait(int shard, int /*tile*/, int k_block) {
    if (block_ == nullptr) return kAllReady;
    const std::uint32_t owner = static_cast<std::uint32_t>(shard) % locals_;
    if ((free_ >> owner & 1) != 0) return kAllReady;
    if (k_block + 1 < params_.k_blocks) return params_.k_blocks - 1;
    if (locals_ > 1) {
      // One look at all of them takes as long as at one.
      free_ |= block_->locals_finished(block_->epoch - 1);
      if ((free_ >> owner & 1) != 0) return kAllReady;
    }
    free_ |= 1u << owner;
    const bool free = locals_ > 1 ? block_->await_finished(owner, block_->epoch - 1)
                                  : block_->await_staging_free();
    if (!free) fail();
    return kAllReady;
  }

  /// The other local rank's partial of a tile of this rank's shard.
  __device__ void await_partial(int /*shard*/, int tile) {
    if (block_ == nullptr) return;
    if (!block_->await_others(static_cast<std::uint32_t>(tile))) fail();
  }
  __device__ void end() const { params_.waits_done.note(); }

 private:
  /// The launch has failed: nothing is stored any more.
  __device__ void fail() {
    block_ = nullptr;
    shared_.in_vain = 1;
  }

  const Params& params_;
  Shared& shared_;
  std::uint32_t locals_;
  GemmRsBlock<GateExecutor>* block_;
  std::uint32_t free_ = 0;  ///< a bit for each owner whose slots are
};

/// A tile's slot at its owner, or, of those that are summed as they are computed, in C; one rank of
/// a node: its place in staging, or among the kept; one rank alone: in C.
struct GemmRsPlaces {
  using Params = PlaceParams<GemmRsSchedule, GemmRsPlaceMaps>;
  static constexpr bool kForwards = false;

  static __device__ std::uint32_t owned_tile(const Params& /*params*/, Tile tile) {
    return static_cast<std::uint32_t>(tile.n);
  }

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
    if (params.maps.sums_own && owner == world.local) {
      // Rows below the tile's are not right: the map of C by rows of tiles keeps them out.
      const TileRect rect = grid.rect(number);
      const std::uint32_t row = rect.row / grid.tile_rows();
      const bool last = row + 1 == grid.tiles_m();
      place.map = last ? &params.maps.out : &params.maps.out_rows;
      place.tile = last ? -1 : static_cast<int>(row);
      place.row = last ? static_cast<int>(rect.row) : 0;
      place.column = static_cast<int>(rect.column);
      return place;
    }
    place.ready = reinterpret_cast<std::uint32_t*>(params.workspaces[owner] +
                                                   schedule.tile_ready(world.local, node, number));
    place.within_rank = owner == world.local;
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
