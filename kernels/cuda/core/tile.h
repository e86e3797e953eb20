/// \file
/// Tile coordinates and the default tile order. Compiles for host and device, so that an order is
/// tested on the host.
#pragma once

#include "kernels/comm/tile_worker.h"
#include "shm/platform.h"

namespace mk::kernels::cuda {

/// Which output tile. Of the plain product: row and column in units of the configuration's tile.
using mk::kernels::Tile;

/// An order's tiles, if they are more than a place in a grid: `using TileType = ...;`, with `m` and
/// `n` as in Tile (m is never negative) and what else its gate and store go by. Where such a tile
/// has `rows`, the first so many rows of it are computed and the others not stored. One with at
/// most 64 is the first math warpgroup's alone.
template <class Order>
struct TileTypeOf {
  using Type = Tile;
};
template <class Order>
requires requires { typename Order::TileType; }
struct TileTypeOf<Order> {
  using Type = typename Order::TileType;
};
template <class Order>
using TileOf = typename TileTypeOf<Order>::Type;

/// Shared memory of an order, if it wants some: `struct Shared;`, filled by all threads of the
/// block in `static void prepare(const Params&, Shared&)` before any tile is asked for. Its
/// constructor takes it, too, behind the parameters.
template <class Order>
inline constexpr bool kOrderShares = requires {
  typename Order::Shared;
};
struct NoOrderShared {};
template <class Order>
struct OrderSharedTypeOf {
  using Type = NoOrderShared;
};
template <class Order>
requires kOrderShares<Order>
struct OrderSharedTypeOf<Order> {
  using Type = typename Order::Shared;
};
template <class Order>
using OrderSharedOf = typename OrderSharedTypeOf<Order>::Type;

/// A **tile order** tells each worker (a block, or a cluster that works on vertically adjacent
/// tiles) which tile comes next. The loading warp, the math warpgroups and the storing warps of a
/// worker each walk their own copy. So the sequence must be a pure function of the parameters and
/// the worker's index.
///
///     struct Params;                                    plain data, among the kernel's arguments
///     Order(const Params&, int worker, int workers);
///     bool next(Tile* tile);                            false: no more tiles for this worker
///
/// `tile.m` counts rows of whole workers: with clusters of 2, tile.m = 3 stands for the block rows
/// 6 and 7.
///
/// RasterOrder: bands of `band` tile rows, walked column by column. So the tiles in flight at one
/// time form a near-square patch of C and share their rows of A and columns of B in L2. Worker w
/// takes every `workers`-th tile.
class RasterOrder {
 public:
  struct Params {
    int tiles_m = 0;  ///< rows of worker tiles
    int tiles_n = 0;  ///< columns of tiles
    int band = 8;     ///< rows of worker tiles in one band
  };

  MK_HOST_DEVICE RasterOrder(const Params& params, int worker, int workers)
      : params_(params), next_(worker), step_(workers) {}

  MK_HOST_DEVICE bool next(Tile* tile) {
    if (next_ >= params_.tiles_m * params_.tiles_n) return false;
    const int band_tiles = params_.band * params_.tiles_n;
    const int first_m = next_ / band_tiles * params_.band;
    const int within = next_ % band_tiles;
    const int rows_left = params_.tiles_m - first_m;
    const int rows = rows_left < params_.band ? rows_left : params_.band;
    tile->m = first_m + within % rows;
    tile->n = within / rows;
    next_ += step_;
    return true;
  }

 private:
  Params params_;
  int next_;
  int step_;
};

}  // namespace mk::kernels::cuda
