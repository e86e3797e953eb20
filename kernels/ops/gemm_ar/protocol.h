/// \file
/// What a compute worker of GEMM+AllReduce does with its tiles: their order, what they wait for,
/// where they go (comm/tile_worker.h says who calls this). The other roles are in roles.h, whose
/// head has the way of a tile.
#pragma once

#include <cstdint>

#include "kernels/comm/tile_worker.h"
#include "kernels/ops/gemm_ar/block.h"
#include "kernels/ops/gemm_ar/launch.h"
#include "kernels/ops/gemm_ar/schedule.h"

namespace mk::kernels {

/// This rank's tiles in the order of schedule.h. `Tile::m` is the tile's number, `n` is 0.
class GemmArTileScheduler : public StepScheduler {
 public:
  struct Params {
    GemmArSchedule schedule;
    std::uint32_t node;
    std::uint32_t local;
    std::uint32_t tiles;
    bool accumulates;  ///< GemmArLaunch::accumulates_own_tiles

    static Params of(const GemmArLaunch& launch) {
      const World& world = launch.context.world;
      return {launch.schedule, world.node, world.local, launch.schedule.tiles(),
              launch.accumulates_own_tiles()};
    }
  };
  using Count = StepScheduler;

  MK_HOST_DEVICE GemmArTileScheduler(const Params& params, int worker, int workers)
      : StepScheduler(params, worker, workers), params_(params) {}

  MK_HOST_DEVICE bool next(Tile* tile) {
    std::uint32_t step;
    if (!take(&step)) return false;
    const GemmArSchedule& schedule = params_.schedule;
    const std::uint32_t number = schedule.tile_at(params_.node, params_.local, step);
    tile->m = static_cast<int>(number);
    tile->n = 0;
    accumulates_ = params_.accumulates && schedule.owner(number) == params_.local;
    return true;
  }
  MK_HOST_DEVICE bool accumulates() const { return accumulates_; }
  MK_HOST_DEVICE TileRect rect(Tile tile) const {
    return params_.schedule.rect(static_cast<std::uint32_t>(tile.m));
  }

 private:
  const Params& params_;
  bool accumulates_ = false;
};

/// With several local ranks a tile waits for nothing: its slot was read before the launch that
/// filled it ended. (A tile that this rank accumulates waits, in the end, for the other's partial.)
/// The only rank of one of several nodes stores into its staging bank, when the daemon has read
/// what was there.
template <class Block>
class GemmArInputBarrier {
 public:
  struct Params {
    bool into_staging;
    bool accumulates;
    int k_blocks;

    static Params of(const GemmArLaunch& launch, int k_blocks) {
      const World& world = launch.context.world;
      return {world.locals == 1 && world.nodes > 1, launch.accumulates_own_tiles(), k_blocks};
    }
    /// Whether any tile waits for anything; else the barrier needs no block.
    MK_HOST_DEVICE bool waits() const { return into_staging || accumulates; }
  };

  MK_HOST_DEVICE GemmArInputBarrier(const Params& params, Block* block, std::uint32_t& wait_failed)
      : params_(params), wait_failed_(wait_failed), block_(block) {}

  MK_HOST_DEVICE int wait(int /*m*/, int /*n*/, int k_block) {
    if (block_ == nullptr || !params_.into_staging) return kAllReady;
    if (k_block + 1 < params_.k_blocks) return params_.k_blocks - 1;
    if (!block_->await_staging_free()) wait_failed_ = 1;
    block_ = nullptr;
    return kAllReady;
  }
  MK_HOST_DEVICE void await_partial(int m, int /*n*/) {
    const auto number = static_cast<std::uint32_t>(m);
    if (wait_failed_ == 0 && !block_->await_others(block_->schedule.owned_index(number)))
      wait_failed_ = 1;
  }

 private:
  const Params& params_;
  std::uint32_t& wait_failed_;
  Block* block_;  ///< null: this rank's tiles wait for nothing, or for nothing more
};

/// A tile's slot at its owner; of those that this rank accumulates, its place in this rank's C,
/// from where the sum goes to the other's; one rank of a node: its place in staging; one rank
/// alone: in C.
struct GemmArPlaces {
  static constexpr bool kForwards = true;

  template <class View>
  static MK_HOST_DEVICE std::uint32_t owned_tile(const View& view, Tile tile) {
    return view.schedule.owned_index(static_cast<std::uint32_t>(tile.m));
  }
  template <class View>
  static MK_HOST_DEVICE std::uint64_t out_ready(const View& view, Tile tile) {
    return view.schedule.out_ready(
        view.world.local, view.schedule.chunk_of(view.world.local, owned_tile(view, tile)));
  }

  template <class View>
  static MK_HOST_DEVICE TilePlace place(const View& view, Tile tile) {
    const auto number = static_cast<std::uint32_t>(tile.m);
    const auto& schedule = view.schedule;
    const std::uint32_t owner = schedule.owner(number);
    const std::uint32_t owned = schedule.owned_index(number);
    TilePlace place;
    place.local = owner;
    place.tile = owned;
    place.rows = schedule.tile_rows();
    place.columns = schedule.tile_cols();
    place.ready = reinterpret_cast<std::uint32_t*>(view.workspaces[owner] +
                                                   schedule.tile_ready(view.world.local, owned));
    place.within_rank = owner == view.world.local;
    const bool accumulates = view.accumulates && place.within_rank;
    if (view.world.locals > 1 && !accumulates) {
      place.region = Region::kSlots;
    } else if (view.world.nodes > 1) {
      const NodePieces::Place staged = schedule.place_in_bank(owner, owned);
      place.region = Region::kStaging;
      place.plane = staged.node;
      place.tile = staged.tile;
    } else {
      place.region = Region::kResult;
      place.rect = schedule.rect(number);
      if (accumulates) place.ready = nullptr;  // nobody waits for a part of it
    }
    return place;
  }
};

/// For comm/compute_role.h.
struct GemmArCompute {
  using Scheduler = GemmArTileScheduler;
  template <class Block>
  using InputBarrier = GemmArInputBarrier<Block>;
  using Places = GemmArPlaces;

  /// How a trace names the tile, and the rank that it goes to.
  template <class Block>
  static void span(Block& block, std::uint64_t begin_ns, Tile tile) {
    const auto number = static_cast<std::uint32_t>(tile.m);
    block.span_end(begin_ns, SpanKind::kTile, number, 0,
                   block.rank_of(block.schedule.owner(number)));
  }
};

}  // namespace mk::kernels
