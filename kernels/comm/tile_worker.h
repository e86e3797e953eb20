/// \file
/// The vocabulary of a compute worker: what computes one operator's tiles, one after the other. An
/// operator's protocol.h says with three policies which tile comes next, what it waits for, and
/// where it goes. The CPU's loop (compute_role.h), the interleaving tests and the GEMM core on a
/// GPU all call the same policies. Compiles for host and device.
///
/// **TileScheduler**: which tile next.
///
///     struct Params;                   plain data; Params::of(launch)
///     TileScheduler(const Params&, int worker, int workers);
///     bool next(Tile*);                false: no more tiles for this worker
///     TileRect rect(Tile) const;       the tile's place in the product
///     bool accumulates() const;        of the tile that `next` gave last: another rank's partial
///                                      is added to it (deferred accumulate, below)
///
/// **InputBarrier**: what a tile waits for. One thread of the worker asks.
///
///     struct Params;                   Params::of(launch, k_blocks)
///     InputBarrier(const Params&, Block* block, std::uint32_t& wait_failed);
///     int wait(int m, int n, int k_block);
///     void await_partial(int m, int n);
///
/// `wait` returns when the inputs of tile (m, n) are ready from block `k_block` of K on, and
/// answers up to which block (exclusive). The worker asks again when it gets there. `await_partial`
/// returns when the other rank's partial of the tile is complete.
///
/// A wait that fails sets `wait_failed` and ends the launch; the worker stores and publishes
/// nothing from then on. What only the *store* of a tile has to wait for is awaited at the last
/// block of K, so that a GPU's loads begin meanwhile.
///
/// **TilePlaces**: where a tile goes, and which flag says that it is complete.
///
///     static TilePlace place(const View&, Tile);
///     static std::uint32_t owned_tile(const View&, Tile);
///     static constexpr bool kForwards;
///     static std::uint64_t out_ready(const View&, Tile);
///
/// `owned_tile` is the number of a tile that this rank owns. Where an operator forwards, sums go
/// from where `place` says to the other rank, too; `out_ready` is the flag of each workspace that
/// publishes the sum.
///
/// A **deferred accumulate**: the worker stores its own partial where the sum is to be, and
/// computes its next tile of that kind. Only then it adds the other rank's partial of the first
/// one, which has had that long to come. deferred.h says when, and why nobody waits in a circle.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/comm/tile_grid.h"
#include "kernels/comm/world.h"
#include "shm/limits.h"
#include "shm/platform.h"

namespace mk::kernels {

/// Which tile: two numbers that the operator's TileScheduler gives a meaning.
struct Tile {
  int m = 0;
  int n = 0;
};

/// InputBarrier::wait: nothing more to wait for.
inline constexpr int kAllReady = 0x7fffffff;

/// What memory a tile goes to.
enum class Region : std::uint32_t {
  kSlots,    ///< this rank's packed partials at the tile's owner on this node
  kStaging,  ///< packed sums that leave for another node, of the launch's bank
  kKept,     ///< packed sums that stay on this rank
  kResult,   ///< the product itself, row by row: the operator's C, or the caller's
};

/// Where a tile goes, and what shows that it is there. The executor knows where a region lies.
struct TilePlace {
  Region region = Region::kResult;
  std::uint32_t local = 0;  ///< kSlots: the owner; kResult: whose
  std::uint32_t plane = 0;  ///< which shard's part of the region
  std::uint32_t tile = 0;   ///< packed regions: the tile's number there
  TileRect rect;            ///< kResult: where in it
  /// Of a packed tile: rows and columns of every tile of its grid. Of the result: the tile's own.
  std::uint32_t rows = 0;
  std::uint32_t columns = 0;
  bool small_grid = false;  ///< of an operator with two grids
  /// Shows that the tile is there; null: nobody waits for it.
  std::uint32_t* ready = nullptr;
  bool within_rank = false;  ///< only this rank's workers wait for that flag
};

/// What TilePlaces go by: `schedule`, `world`, `banks`, `accumulates` and `workspaces`. This is the
/// host's; a GPU has one with tensor maps in its kernel arguments.
template <class ScheduleType>
struct PlaceView {
  const ScheduleType& schedule;
  World world;
  std::uint32_t banks;
  bool accumulates;
  std::byte* const* workspaces;

  template <class OperatorLaunch>
  static MK_HOST_DEVICE PlaceView of(const OperatorLaunch& launch) {
    return {launch.schedule, launch.context.world, launch.banks, launch.accumulates_own_tiles(),
            launch.context.workspaces};
  }
};

/// Schedulers given by a schedule: worker w takes steps w, w + workers, ....
class StepScheduler {
 public:
  /// `Params` has `tiles`, their number.
  template <class Params>
  MK_HOST_DEVICE StepScheduler(const Params& params, int worker, int workers)
      : step_(static_cast<std::uint32_t>(worker)),
        workers_(static_cast<std::uint32_t>(workers)),
        tiles_(params.tiles) {}

  /// Counts the tiles without knowing which they are.
  MK_HOST_DEVICE bool next(Tile* /*tile*/) {
    std::uint32_t step;
    return take(&step);
  }

 protected:
  MK_HOST_DEVICE bool take(std::uint32_t* step) {
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

/// Adds `partial` to the tile at `target`, in fp32, rounded once, and copies the sum to `copies`.
/// Strides in elements.
struct AccumulateJob {
  const void* partial = nullptr;
  std::uint64_t partial_stride = 0;
  void* target = nullptr;
  void* copies[shm::kLocalRanksMax] = {};
  std::uint32_t copy_count = 0;
  std::uint64_t target_stride = 0;  ///< and of the copies
  std::uint32_t rows = 0;
  std::uint32_t columns = 0;
};

}  // namespace mk::kernels
