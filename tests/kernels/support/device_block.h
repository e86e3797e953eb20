/// \file
/// A thread block of the GPU's GEMM core, on the host: a loading and two storing threads, each a
/// fiber, call an operator's policies (kernels/comm/tile_worker.h) in the order in which
/// gemm_core.cuh, packed_store.cuh and late_adds.cuh call them. So the interleaving tests run what
/// GPUs run: loads ahead of stores, and waits at the last block of K only. Different threads store
/// the halves of a tile, and the later of the two sets flags. Partials are accumulated one tile
/// late. (What a host cannot show: fences, the async proxy, scopes.)
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/comm/tile_worker.h"
#include "tests/kernels/support/simulation.h"

namespace mk::kernels::testing {

/// What the three threads of a block share in a launch: its shared memory.
struct DeviceBlockState {
  std::uint32_t loaded = 0;          ///< tiles
  std::uint32_t multiplied[2] = {};  ///< of these, by the math warpgroup of each half
  std::uint32_t wait_failed = 0;
  std::uint32_t partials_here = 0;       ///< handed over by the loading thread
  std::uint32_t partials_taken[2] = {};  ///< by each storing thread
  std::uint32_t halves_stored[2] = {};   ///< tiles
  std::uint32_t halves_accumulated[2] = {};
  std::uint32_t ended = 0;  ///< storing threads
};

/// Parts of a block: what a fiber is.
inline constexpr std::uint32_t kDeviceParts = 3;
inline constexpr std::uint32_t kLoadingPart = 0;  // the others store a half each

/// `Compute`: the operator's policies. `block`: this fiber's own, with the thread block's index.
template <class Compute, class Block>
class DeviceBlock {
  using Places = typename Compute::Places;
  using Scheduler = typename Compute::Scheduler;
  using InputBarrier = typename Compute::template InputBarrier<Block>;

 public:
  /// `k_blocks`: blocks of K.
  DeviceBlock(Block& block, DeviceBlockState& state, std::uint32_t k_blocks)
      : block_(block),
        state_(state),
        k_blocks_(k_blocks),
        params_(Scheduler::Params::of(block.launch)),
        scheduler_(params_, static_cast<int>(block.index),
                   static_cast<int>(block.launch.blocks.compute)),
        view_(View::of(block.launch)) {}

  /// One part of the block. False: the launch has failed.
  bool run(std::uint32_t part) {
    if (part != kLoadingPart) {
      store(part - 1);
      set(&state_.ended);
      return true;
    }
    load();
    if (!poll_until([&] { return state_.ended == kDeviceParts - 1; })) return false;
    if (state_.wait_failed != 0 || block_.stopped()) return false;
    block_.publish_done(block_.launch.blocks.compute);
    return true;
  }

 private:
  using View = PlaceView<std::remove_cvref_t<decltype(Block::launch.schedule)>>;
  /// So many tiles may be loaded and not yet multiplied.
  static constexpr std::uint32_t kTilesAhead = 2;
  /// The clock stands still while anybody can go on, and jumps by a millisecond then.
  static constexpr std::uint64_t kDeadlineNs = 20'000'000;

  /// False: nobody in the simulation can go on. A thread of this block left with its launch, or the
  /// block waits in a circle: the launch fails, as a block of a GPU ends at its deadline.
  template <class Condition>
  bool poll_until(Condition&& condition) {
    const std::uint64_t begin_ns = block_.executor.now_ns();
    while (!condition()) {
      if (block_.executor.now_ns() - begin_ns > kDeadlineNs) {
        state_.wait_failed = 1;
        block_.stop();
        return false;
      }
      block_.executor.pause(0);
    }
    return true;
  }
  void set(std::uint32_t* count) {
    block_.executor.stores_done();
    ++*count;
  }

  void load() {
    const auto params = InputBarrier::Params::of(block_.launch, static_cast<int>(k_blocks_));
    InputBarrier barrier(params, params.waits() ? &block_ : nullptr, state_.wait_failed);
    Tile deferred{-1, -1};
    const auto hand_over = [&] {
      if (deferred.m < 0) return true;
      const bool taken = poll_until([&] {
        return std::min(state_.partials_taken[0], state_.partials_taken[1]) == state_.partials_here;
      });
      if (!taken) return false;
      barrier.await_partial(deferred.m, deferred.n);
      set(&state_.partials_here);
      return true;
    };
    for (Tile tile; scheduler_.next(&tile);) {
      int ready_until = 0;
      for (int k_block = 0; k_block < static_cast<int>(k_blocks_); ++k_block) {
        if (k_block >= ready_until) ready_until = barrier.wait(tile.m, tile.n, k_block);
        const bool room = poll_until([&] {
          return state_.loaded < std::min(state_.multiplied[0], state_.multiplied[1]) + kTilesAhead;
        });
        if (!room) return;
      }
      set(&state_.loaded);
      if (scheduler_.accumulates()) {
        if (!hand_over()) return;
        deferred = tile;
      }
    }
    hand_over();
  }

  void store(std::uint32_t half) {
    Tile deferred{-1, -1};
    for (Tile tile; scheduler_.next(&tile);) {
      if (!poll_until([&] { return state_.multiplied[half] < state_.loaded; })) return;
      set(&state_.multiplied[half]);
      const TilePlace place = Places::place(view_, tile);
      put(half, tile, place);
      if (is_last_half(state_.halves_stored, half) && place.ready != nullptr) {
        if (place.within_rank) {
          block_.publish_within_rank(place.ready);
        } else {
          block_.publish(place.ready);
        }
      }
      if (!scheduler_.accumulates()) continue;
      if (!accumulate(half, deferred)) return;
      deferred = tile;
    }
    accumulate(half, deferred);
  }

  /// Rows of a tile that the thread of that half stores.
  static TileRect rows_of(std::uint32_t half, TileRect rect, std::uint32_t tile_rows) {
    const std::uint32_t first = half * div_up(tile_rows, 2);
    const std::uint32_t end = half == 0 ? div_up(tile_rows, 2) : tile_rows;
    const std::uint32_t rows = std::min(end, rect.rows);
    rect.row += first;
    rect.rows = rows > first ? rows - first : 0;
    return rect;
  }
  void put(std::uint32_t half, Tile tile, const TilePlace& place) {
    if (state_.wait_failed != 0) return;
    const TileRect whole = scheduler_.rect(tile);
    const TileRect rect = rows_of(half, whole, place.rows);
    std::uint64_t stride = 0;
    std::byte* target = block_.address(place, &stride);
    block_.executor.multiply(rect, target + (rect.row - whole.row) * stride * kElementBytes,
                             stride);
  }
  /// False: as poll_until.
  bool accumulate(std::uint32_t half, Tile tile) {
    if (tile.m < 0) return true;
    if (!poll_until([&] { return state_.partials_taken[half] < state_.partials_here; }))
      return false;
    set(&state_.partials_taken[half]);
    const TilePlace place = Places::place(view_, tile);
    if (state_.wait_failed == 0) {
      AccumulateJob job = block_.accumulate_job(place);
      const TileRect rect = rows_of(half, place.rect, place.rows);
      const std::uint64_t skipped = rect.row - place.rect.row;
      const auto skip = [&](auto*& address, std::uint64_t stride) {
        if (address != nullptr)
          address = const_cast<std::byte*>(static_cast<const std::byte*>(address)) +
                    skipped * stride * kElementBytes;
      };
      skip(job.partial, job.partial_stride);
      skip(job.target, job.target_stride);
      for (void*& copy : job.copies) skip(copy, job.target_stride);
      job.rows = rect.rows;
      block_.executor.accumulate(job);
    }
    if constexpr (Places::kForwards) {
      if (is_last_half(state_.halves_accumulated, half))
        block_.publish_at_every_local(Places::out_ready(view_, tile));
    }
    return true;
  }
  /// Whether the tile's other half was done before, and the launch goes well.
  bool is_last_half(std::uint32_t* halves, std::uint32_t half) {
    set(&halves[half]);
    return halves[1 - half] >= halves[half] && !block_.stopped();
  }

  Block& block_;
  DeviceBlockState& state_;
  const std::uint32_t k_blocks_;
  const typename Scheduler::Params params_;
  Scheduler scheduler_;
  const View view_;
};

}  // namespace mk::kernels::testing
