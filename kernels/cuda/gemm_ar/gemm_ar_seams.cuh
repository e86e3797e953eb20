/// \file
/// The compute role of GEMM + AllReduce as seams of the GEMM core: tiles in the schedule's order,
/// stored as packed tiles at their owner, each shown by its tile_ready flag; this rank's own
/// perhaps straight into C, where the other's partial is added.
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
    bool sums_own;  ///< GemmArLaunch::sums_own_tiles
  };
  using Count = StepCount;

  __device__ GemmArOrder(const Params& params, int worker, int workers)
      : StepCount(params, worker, workers), params_(params) {}

  __device__ bool next(Tile* tile) {
    std::uint32_t step;
    if (!take(&step)) return false;
    const GemmArSchedule& schedule = params_.schedule;
    const std::uint32_t number = schedule.tile_at(params_.local, step);
    tile->m = static_cast<int>(number);
    tile->n = 0;
    adds_ = params_.sums_own && schedule.owner(number) == params_.local;
    return true;
  }
  __device__ bool adds() const { return adds_; }
  __device__ Tile origin(Tile tile) const {
    const TileRect rect = params_.schedule.rect(static_cast<std::uint32_t>(tile.m));
    return {static_cast<int>(rect.row), static_cast<int>(rect.column)};
  }

 private:
  const Params& params_;
  bool adds_ = false;
};

/// Several local ranks: a tile waits for nothing, but this rank's own ones, where they are added
/// up, in the end, for the other's partial. One of several nodes stores into its staging bank, when
/// the daemon has read what was there.
class GemmArGate {
 public:
  struct Params {
    bool into_staging;
    bool sums_own;
    int k_blocks;
  };
  using Shared = BlockGateShared<GemmArLaunch, GemmArBlock>;

  __device__ GemmArGate(const Params& params, Shared& shared)
      : params_(params),
        shared_(shared),
        block_(params.into_staging || params.sums_own ? &shared.make_block() : nullptr) {}

  /// As only the store has to wait, the first tile's loads begin meanwhile, all but the last.
  __device__ int wait(int, int, int k_block) {
    if (block_ == nullptr || !params_.into_staging) return kAllReady;
    if (k_block + 1 < params_.k_blocks) return params_.k_blocks - 1;
    // If not, the launch has failed: nothing is stored.
    if (!block_->await_staging_free()) shared_.in_vain = 1;
    block_ = nullptr;
    return kAllReady;
  }

  /// The other local rank's partial of a tile of this rank's.
  __device__ void await_partial(int tile, int /*n*/) {
    const auto number = static_cast<std::uint32_t>(tile);
    if (shared_.in_vain == 0 && !block_->await_others(block_->schedule.owned_index(number)))
      shared_.in_vain = 1;
  }

 private:
  const Params& params_;
  Shared& shared_;
  GemmArBlock<GateExecutor>* block_;  ///< null: this rank's tiles wait for nothing
};

/// A tile's slot at its owner, or, of those that are summed as they are computed, in this rank's C,
/// from where the sum goes to the other's; one rank of a node: its place in staging; one rank
/// alone: in C.
struct GemmArPlaces {
  using Params = PlaceParams<GemmArSchedule, GemmArPlaceMaps>;
  static constexpr bool kForwards = true;

  static __device__ std::uint32_t owned_tile(const Params& params, Tile tile) {
    return params.schedule.owned_index(static_cast<std::uint32_t>(tile.m));
  }
  static __device__ const CUtensorMap* other_out(const Params& params) {
    return &params.maps.out[1 - params.world.local];
  }
  static __device__ std::uint64_t out_ready(const Params& params, Tile tile) {
    return params.schedule.out_ready(params.world.local, owned_tile(params, tile));
  }

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
    place.within_rank = owner == params.world.local;
    const bool sums = params.maps.sums_own && place.within_rank;
    if (params.world.locals > 1 && !sums) {
      place.map = &params.maps.slots[owner];
    } else if (params.world.nodes > 1) {
      place.map = &params.maps.staging[bank_of(epoch, params.banks)];
    } else {
      const TileRect rect = schedule.rect(number);
      place.map = &params.maps.out[sums ? owner : 0];
      if (sums) place.ready = nullptr;  // nobody waits for a part of it
      place.tile = -1;
      place.row = static_cast<int>(rect.row);
      place.column = static_cast<int>(rect.column);
    }
    return place;
  }
};

}  // namespace mk::kernels::cuda
