/// \file
/// The compute role where one thread does all of it: an operator's policies (tile_worker.h) called
/// one after the other. So it is on the CPU, in one of two forms in the interleaving tests, and on
/// a GPU where a tile is a copy. Products call the policies there from the GEMM core's threads.
/// Compiles for host and device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/comm/deferred.h"
#include "kernels/comm/tile_worker.h"
#include "kernels/comm/trace.h"

namespace mk::kernels {

/// Adds the other rank's partial to the tile, by an executor that can.
template <class Places, class Block, class View>
MK_HOST_DEVICE inline bool accumulate_tile(Block& block, const View& view, Tile tile) {
  if constexpr (requires(AccumulateJob job) { block.executor.accumulate(job); }) {
    const std::uint64_t begin_ns = block.span_begin();
    block.executor.accumulate(block.accumulate_job(Places::place(view, tile)));
    block.span_end(begin_ns, SpanKind::kSum, Places::owned_tile(view, tile), block.world.node,
                   block.world.rank());
    if constexpr (Places::kForwards) block.publish_at_every_local(Places::out_ready(view, tile));
  }
  return true;
}

/// Computes tiles `index`, `index` + workers, ... of this rank's order, `index` being the block's.
/// `Compute`: the operator's policies, as GemmArCompute. The block has
///
///     std::byte* address(const TilePlace&, std::uint64_t* stride) const;
///     AccumulateJob accumulate_job(const TilePlace&) const;
///
/// the first element of a tile's place, and where an operator accumulates, what is added there. Its
/// executor has
///
///     bool multiply(const TileRect&, void* target, std::uint64_t target_stride);
///     void accumulate(const AccumulateJob&);    only if the operator accumulates
///
/// `multiply` stores this rank's partial of the tile, rounded to the element type. False: it
/// cannot, and has noted why.
///
/// False: the launch has failed.
template <class Compute, class Block>
MK_HOST_DEVICE inline bool compute_tiles(Block& block) {
  using Places = typename Compute::Places;
  using Scheduler = typename Compute::Scheduler;
  using InputBarrier = typename Compute::template InputBarrier<Block>;
  const auto& launch = block.launch;
  const auto view = PlaceView<std::remove_cvref_t<decltype(launch.schedule)>>::of(launch);
  const auto scheduler_params = Scheduler::Params::of(launch);
  const auto barrier_params = InputBarrier::Params::of(launch, 1);
  std::uint32_t wait_failed = 0;
  Scheduler scheduler(scheduler_params, static_cast<int>(block.index),
                      static_cast<int>(launch.blocks.compute));
  InputBarrier barrier(barrier_params, barrier_params.waits() ? &block : nullptr, wait_failed);
  DeferredAccumulate<Tile> deferred;
  const auto accumulate = [&](Tile tile) {
    barrier.await_partial(tile.m, tile.n);
    return wait_failed == 0 && accumulate_tile<Places>(block, view, tile);
  };
  for (Tile tile; scheduler.next(&tile);) {
    if (block.stopped()) return false;
    barrier.wait(tile.m, tile.n, 0);
    if (wait_failed != 0) return false;
    const TilePlace place = Places::place(view, tile);
    std::uint64_t stride = 0;
    std::byte* target = block.address(place, &stride);
    const std::uint64_t begin_ns = block.span_begin();
    if (!block.executor.multiply(scheduler.rect(tile), target, stride)) {
      block.stop();
      return false;
    }
    Compute::span(block, begin_ns, tile);
    if (place.ready != nullptr) {
      if (place.within_rank) {
        block.publish_within_rank(place.ready);
      } else {
        block.publish(place.ready);
      }
    }
    if (scheduler.accumulates() && !deferred.next(tile, accumulate)) return false;
  }
  if (!deferred.end(accumulate)) return false;
  block.publish_done(launch.blocks.compute);
  return true;
}

}  // namespace mk::kernels
