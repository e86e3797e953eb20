/// \file
/// What a compute worker of GEMM+ReduceScatter does with its tiles: their order, what they wait
/// for, where they go (comm/tile_worker.h says who calls this). The other roles are in roles.h,
/// whose head has the way of a tile.
#pragma once

#include <cstdint>

#include "kernels/comm/tile_worker.h"
#include "kernels/ops/gemm_rs/block.h"
#include "kernels/ops/gemm_rs/launch.h"
#include "kernels/ops/gemm_rs/schedule.h"

namespace mk::kernels {

/// This rank's tiles in the order of schedule.h. `Tile::m` is the shard (its rank), `n` the tile of
/// it.
class GemmRsTileScheduler : public StepScheduler {
 public:
  struct Params {
    GemmRsSchedule schedule;
    World world;
    std::uint32_t tiles;
    bool accumulates;  ///< GemmRsLaunch::accumulates_own_tiles

    static MK_HOST_DEVICE Params of(const GemmRsLaunch& launch) {
      return {launch.schedule, launch.context.world, launch.schedule.tiles(),
              launch.accumulates_own_tiles()};
    }
  };
  using Count = StepScheduler;

  MK_HOST_DEVICE GemmRsTileScheduler(const Params& params, int worker, int workers)
      : StepScheduler(params, worker, workers), params_(params) {}

  MK_HOST_DEVICE bool next(Tile* tile) {
    std::uint32_t step;
    if (!take(&step)) return false;
    const World& world = params_.world;
    const GemmRsSchedule::Tile found = params_.schedule.tile_at(world.node, world.local, step);
    accumulates_ = params_.accumulates && found.local == world.local;
    tile->m = static_cast<int>(found.node * world.locals + found.local);
    tile->n = static_cast<int>(found.tile);
    return true;
  }
  MK_HOST_DEVICE bool accumulates() const { return accumulates_; }
  MK_HOST_DEVICE TileRect rect(Tile tile) const {
    const auto shard = static_cast<std::uint32_t>(tile.m);
    TileRect rect = params_.schedule.grid(shard).rect(static_cast<std::uint32_t>(tile.n));
    rect.row += params_.schedule.rows(shard).first;
    return rect;
  }

 private:
  const Params& params_;
  bool accumulates_ = false;
};

/// A tile waits until its owner has read this rank's slots of the last launch; where a worker
/// stores into staging, until the daemon has read what was there.
template <class Block>
class GemmRsInputBarrier {
 public:
  struct Params {
    World world;
    int k_blocks;

    static MK_HOST_DEVICE Params of(const GemmRsLaunch& launch, int k_blocks) {
      return {launch.context.world, k_blocks};
    }
    /// Whether any tile waits for anything; else the barrier needs no block.
    MK_HOST_DEVICE bool waits() const { return world.size() > 1; }
  };

  MK_HOST_DEVICE GemmRsInputBarrier(const Params& params, Block* block, std::uint32_t& wait_failed)
      : params_(params), wait_failed_(wait_failed), locals_(params.world.locals), block_(block) {}

  MK_HOST_DEVICE int wait(int m, int /*n*/, int k_block) {
    if (block_ == nullptr) return kAllReady;
    const std::uint32_t owner = static_cast<std::uint32_t>(m) % locals_;
    if ((free_ >> owner & 1) != 0) return kAllReady;
    if (k_block + 1 < params_.k_blocks) return params_.k_blocks - 1;
    if constexpr (requires { block_->executor.acquire_fence(); }) {
      if (locals_ > 1) {
        // One look at all of them takes as long as at one.
        free_ |= block_->locals_finished(block_->epoch - 1);
        if ((free_ >> owner & 1) != 0) return kAllReady;
      }
    }
    free_ |= 1u << owner;
    const bool free = locals_ > 1 ? block_->await_finished(owner, block_->epoch - 1)
                                  : block_->await_staging_free();
    if (!free) fail();
    return kAllReady;
  }
  /// Of a tile of this rank's own shard.
  MK_HOST_DEVICE void await_partial(int /*m*/, int n) {
    if (block_ == nullptr) return;
    if (!block_->await_others(static_cast<std::uint32_t>(n))) fail();
  }

 private:
  MK_HOST_DEVICE void fail() {
    block_ = nullptr;
    wait_failed_ = 1;
  }

  const Params& params_;
  std::uint32_t& wait_failed_;
  std::uint32_t locals_;
  Block* block_;            ///< null: this rank's tiles wait for nothing, or the launch has failed
  std::uint32_t free_ = 0;  ///< a bit for each owner whose slots are
};

/// A tile's slot at its owner; of those that this rank accumulates, its place in C; one rank of a
/// node: its place in staging, or among the kept; one rank alone: in C.
struct GemmRsPlaces {
  static constexpr bool kForwards = false;

  template <class View>
  static MK_HOST_DEVICE std::uint32_t owned_tile(const View& /*view*/, Tile tile) {
    return static_cast<std::uint32_t>(tile.n);
  }

  template <class View>
  static MK_HOST_DEVICE TilePlace place(const View& view, Tile tile) {
    const auto& schedule = view.schedule;
    const World& world = view.world;
    const auto shard = static_cast<std::uint32_t>(tile.m);
    const auto number = static_cast<std::uint32_t>(tile.n);
    const std::uint32_t node = shard / world.locals;
    const std::uint32_t owner = shard - node * world.locals;
    const TileGrid& grid = schedule.grid(shard);
    TilePlace place;
    place.local = owner;
    place.tile = number;
    place.rows = grid.tile_rows();
    place.columns = grid.tile_cols();
    place.small_grid = &grid != &schedule.large_grid();
    if (view.accumulates && owner == world.local) {
      place.region = Region::kResult;
      place.rect = grid.rect(number);
      return place;  // nobody waits for a part of it
    }
    place.ready = reinterpret_cast<std::uint32_t*>(view.workspaces[owner] +
                                                   schedule.tile_ready(world.local, node, number));
    place.within_rank = owner == world.local;
    if (world.locals > 1) {
      place.region = Region::kSlots;
      place.plane = node;
    } else if (node != world.node) {
      place.region = Region::kStaging;
      place.plane = peer_index(world.node, node);
    } else if (world.nodes > 1) {
      place.region = Region::kKept;
    } else {
      place.region = Region::kResult;
      place.rect = grid.rect(number);
    }
    return place;
  }
};

/// For comm/compute_role.h.
struct GemmRsCompute {
  using Scheduler = GemmRsTileScheduler;
  template <class Block>
  using InputBarrier = GemmRsInputBarrier<Block>;
  using Places = GemmRsPlaces;

  /// How a trace names the tile, and the rank that it goes to.
  template <class Block>
  static MK_HOST_DEVICE void span(Block& block, std::uint64_t begin_ns, Tile tile) {
    block.span_end(begin_ns, SpanKind::kTile, static_cast<std::uint32_t>(tile.n), 0,
                   static_cast<std::uint32_t>(tile.m));
  }
};

}  // namespace mk::kernels
