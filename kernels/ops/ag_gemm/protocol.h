/// \file
/// What a compute worker of AllGather+GEMM does with its tiles: their order, and what they wait
/// for (comm/tile_worker.h says who calls this). A tile goes to the caller's C, and nobody waits
/// for it. The other roles are in roles.h.
#pragma once

#include <cstdint>

#include "kernels/comm/divisor.h"
#include "kernels/comm/tile_worker.h"
#include "kernels/ops/ag_gemm/block.h"
#include "kernels/ops/ag_gemm/launch.h"
#include "kernels/ops/ag_gemm/schedule.h"

namespace mk::kernels {

/// Which tile, as two numbers: `Tile::m` = origin * rounds + round, `n` the column of tiles.
struct AgGemmTiles {
  AgGemmSchedule schedule;
  Divisor rounds;
  std::uint32_t tiles;

  static AgGemmTiles of(const AgGemmSchedule& schedule) {
    return {schedule, Divisor(schedule.rounds()), schedule.tiles()};
  }
  MK_HOST_DEVICE AgGemmTile find(Tile tile) const {
    const std::uint32_t origin = static_cast<std::uint32_t>(tile.m) / rounds;
    return schedule.tile(origin, static_cast<std::uint32_t>(tile.m) - origin * rounds.value(),
                         static_cast<std::uint32_t>(tile.n));
  }
};

/// How an AllGather+GEMM deals out its tiles.
struct AgGemmOrder {
  AgGemmTiles tiles;
  AgGemmBands bands;
  /// A tile waits for all rows of its shard that are walked together with it. So blocks which begin
  /// a band at one time read the same part of B at one time until its end.
  bool in_bands = false;

  static AgGemmOrder of(const AgGemmLaunch& launch) {
    return {AgGemmTiles::of(launch.schedule),
            AgGemmBands::of(launch.schedule, launch.arrival, launch.blocks.compute), false};
  }
};

/// The tiles in the order of schedule.h. `Steps` says which of them are this worker's:
///
///     Steps(const Params&, int worker, int workers);   Params has `order`
///     bool take(std::uint32_t* step);                  ever later ones; false: no more
template <class Steps, class ParamsType>
class AgGemmTileScheduler {
 public:
  using Params = ParamsType;

  MK_HOST_DEVICE AgGemmTileScheduler(const Params& params, int worker, int workers)
      : params_(params),
        steps_(params, worker, workers),
        walk_(params.order.tiles.schedule, params.order.bands, 0) {}

  MK_HOST_DEVICE bool next(Tile* tile) {
    std::uint32_t step;
    const bool first = at_ == kNone;
    if (!steps_.take(first, &step)) return false;
    walk_.advance(first ? step : step - at_);
    at_ = step;
    const std::uint32_t rounds = params_.order.tiles.rounds.value();
    tile->m = static_cast<int>(walk_.origin() * rounds + walk_.round());
    tile->n = static_cast<int>(walk_.column());
    return true;
  }
  MK_HOST_DEVICE TileRect rect(Tile tile) const { return params_.order.tiles.find(tile).rect; }

 private:
  static constexpr std::uint32_t kNone = 0xffffffffu;
  const Params& params_;
  Steps steps_;
  AgGemmWalk walk_;
  std::uint32_t at_ = kNone;  ///< the step that walk_ is at; kNone: the first, and none is taken
};

/// Every `workers`-th step.
class AgGemmEvenSteps {
 public:
  struct Params {
    AgGemmOrder order;
  };
  MK_HOST_DEVICE AgGemmEvenSteps(const Params& params, int worker, int workers)
      : next_(static_cast<std::uint32_t>(worker)),
        workers_(static_cast<std::uint32_t>(workers)),
        tiles_(params.order.tiles.tiles) {}
  MK_HOST_DEVICE bool take(bool /*first*/, std::uint32_t* step) {
    if (next_ >= tiles_) return false;
    *step = next_;
    next_ += workers_;
    return true;
  }

 private:
  std::uint32_t next_;
  std::uint32_t workers_;
  std::uint32_t tiles_;
};

/// A tile waits for its rows of A; for everybody's in an unfused launch, or if it spans all shards.
template <class Block>
class AgGemmInputBarrier {
 public:
  struct Params {
    AgGemmOrder order;
    bool unfused;

    static Params of(const AgGemmLaunch& launch) {
      return {AgGemmOrder::of(launch), launch.mode == Mode::kUnfused};
    }
  };

  MK_HOST_DEVICE AgGemmInputBarrier(const Params& params, Block& block)
      : params_(params),
        block_(block),
        all_(params.unfused || params.order.tiles.schedule.spans()) {}

  /// Returns when the rows of that tile are here, or a wait has failed (now or before).
  MK_HOST_DEVICE void await_rows(const AgGemmTile& tile) {
    if (failed_) return;
    if (all_) {
      all_ = false;
      failed_ = !block_.gather.await_all();
    }
    // This rank's own rows are read where the caller has them.
    if (!failed_ && tile.origin != block_.world.rank())
      failed_ = !block_.gather.await_rows(tile.origin, tile.row, end_of_rows(tile));
  }
  MK_HOST_DEVICE bool failed() const { return failed_; }

 private:
  /// Behind the rows that a tile waits for.
  MK_HOST_DEVICE std::uint32_t end_of_rows(const AgGemmTile& tile) const {
    const std::uint32_t end = tile.row + tile.rect.rows;
    if (!params_.order.in_bands) return end;
    const AgGemmSchedule& schedule = params_.order.tiles.schedule;
    const TileGrid& grid = schedule.grid(tile.origin);
    const std::uint32_t round = tile.row / grid.tile_rows();
    const AgGemmBands& bands = params_.order.bands;
    const AgGemmBands::Place at = bands.place(schedule.gather(), tile.origin);
    const std::uint32_t end_of_band = bands.end_of_band(at, round) * grid.tile_rows();
    return end_of_band < grid.rows() ? end_of_band : grid.rows();
  }

  const Params& params_;
  Block& block_;
  bool all_;
  bool failed_ = false;
};

}  // namespace mk::kernels
