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
class GemmArOrder : public OwnStepCount {
 public:
  struct Params {
    GemmArSchedule schedule;
    std::uint32_t local;
    std::uint32_t tiles;
    OwnSteps own;  ///< as it is: this rank's are like the others'
  };
  using Count = OwnStepCount;

  __device__ GemmArOrder(const Params& params, int worker, int workers)
      : OwnStepCount(params, worker, workers), params_(params) {}

  __device__ bool next(Tile* tile) {
    if (!take(&step_)) return false;
    const GemmArSchedule& schedule = params_.schedule;
    tile->m =
        static_cast<int>(params_.own.any() ? schedule.tile_at(params_.local, step_, params_.own)
                                           : schedule.tile_at(params_.local, step_));
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

/// Several local ranks: a tile waits for nothing, but its own ones that are added up, in the end,
/// for the others' partials. One of several nodes stores into its staging bank, when the daemon has
/// read what was there.
class GemmArGate {
 public:
  struct Params : PartialsOfOwn {
    bool into_staging;
    bool sums_own;
    int k_blocks;
  };
  using Shared = BlockGateShared<GemmArLaunch, GemmArBlock<GateExecutor>>;

  __device__ GemmArGate(const Params& params, Shared& shared)
      : params_(params),
        block_(params.into_staging || params.sums_own ? &shared.make_block() : nullptr) {}

  /// As only the store has to wait, the first tile's loads begin meanwhile, all but the last.
  __device__ int wait(int, int, int k_block) {
    if (block_ == nullptr || !params_.into_staging) return kAllReady;
    if (k_block + 1 < params_.k_blocks) return params_.k_blocks - 1;
    // If not, the launch has failed: the store then shows nothing.
    block_->await_staging_free();
    block_ = nullptr;
    return kAllReady;
  }

  /// The other local ranks' partials of a tile of this rank's.
  __device__ void await_partials(int tile, int /*n*/) {
    failed_ = failed_ || !block_->await_others(owned_index(tile));
    // Also when the launch has failed: the store is to see that.
    GateExecutor::loads_begin();
  }
  __device__ void load_partial(std::uint32_t source, int tile, int /*n*/, int row, int column,
                               std::uint64_t* full, std::uint64_t hint, void* to) const {
    params_.load(source, static_cast<int>(owned_index(tile)), row, column, full, hint, to);
  }

 private:
  __device__ std::uint32_t owned_index(int tile) const {
    return block_->schedule.owned_index(static_cast<std::uint32_t>(tile));
  }

  const Params& params_;
  GemmArBlock<GateExecutor>* block_;  ///< null: this rank's tiles wait for nothing
  bool failed_ = false;
};

/// A tile's slot at its owner, or, of those that are summed as they are computed, in every C; one
/// rank of a node: its place in staging; one rank alone: in C.
struct GemmArPlaces {
  using Params = PlaceParams<GemmArSchedule, GemmArPlaceMaps>;
  static constexpr bool kEverywhere = true;

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
      place.map = params.maps.out;
      place.everywhere = sums;
      place.ready_at = schedule.out_ready(owner, owned);
      place.tile = -1;
      place.row = static_cast<int>(rect.row);
      place.column = static_cast<int>(rect.column);
    }
    return place;
  }
};

}  // namespace mk::kernels::cuda
