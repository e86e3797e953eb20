/// \file
/// How the warps of a block walk an order of tiles (tile.h): each its own copy of the order, or
/// what the loading thread hands on.
#pragma once

#include "kernels/cuda/core/tile.h"
#include "kernels/cuda/core/tile_feed.cuh"

namespace mk::kernels::cuda {

/// What the math warpgroups walk: they need to know that there is a tile, not which. An order whose
/// `next` is dear names a cheaper one that ends with it: `Count(const Params&, int worker, int
/// workers)` with `bool next(Tile*)`.
template <class Order>
struct CountOf {
  using Type = Order;
};
template <class Order>
requires requires { typename Order::Count; }
struct CountOf<Order> {
  using Type = typename Order::Count;
};

/// An order whose tiles are taken at run time, `static constexpr bool kTaken = true`: only the
/// loading thread has one, and hands its tiles on (TileFeed).
template <class Order>
inline constexpr bool kIsTaken = requires {
  requires Order::kTaken;
};

template <class Order, class Params, class OrderShared>
__device__ __forceinline__ Order make_order(const Params& params, OrderShared& shared, int worker,
                                            int workers) {
  if constexpr (kOrderShares<Order>) {
    return Order(params, shared, worker, workers);
  } else {
    return Order(params, worker, workers);
  }
}

/// What the warps that do not load walk: the order itself, or what the loading thread hands on.
template <class Order, bool kWholeWarp>
class TileWalk {
 public:
  template <class Params, class Shared>
  __device__ TileWalk(const Params& params, Shared& shared, int worker, int workers)
      : order_(make_order<Order>(params, shared.order, worker, workers)) {}
  __device__ bool next(TileOf<Order>* tile) { return order_.next(tile); }
  /// Of an order that kAccumulates.
  __device__ bool accumulates() const { return order_.accumulates(); }

 private:
  Order order_;
};
template <class Order, bool kWholeWarp>
requires kIsTaken<Order>
class TileWalk<Order, kWholeWarp> {
 public:
  template <class Params, class Shared>
  __device__ TileWalk(const Params& /*params*/, Shared& shared, int, int) : feed_(shared.feed) {}
  __device__ bool next(TileOf<Order>* tile) { return feed_.get(number_++, tile, kWholeWarp); }

 private:
  TileFeed<TileOf<Order>>& feed_;
  std::uint32_t number_ = 0;
};

}  // namespace mk::kernels::cuda
