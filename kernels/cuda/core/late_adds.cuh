/// \file
/// Tiles that another rank's partial is added to by the copy engine, one of them late
/// (comm/deferred.h says why, and why nobody waits in a circle). A block stores its own partial
/// where the sum is to be, and computes the next such tile. By then the other's partial of the
/// first lies in this GPU's memory. The block has it brought into shared memory and added in L2.
/// Math has nothing to do with it. Between a block's threads (gemm_core.cuh):
///
///     loading thread     has issued such a tile's loads: awaits the other's partial of the last
///                        one (the gate), late.there -> storing threads, <- late.taken
///     storing thread w   has stored such a tile: its rows of the last one, into the staging just
///                        emptied, which math gets back later for that, and from there onto what
///                        was stored
///
/// One addition of two rounded values, rounded once, gives the same bits as a sum in fp32 that is
/// rounded then, in either order. (Double rounding is innocuous where the wider type has 2p + 2
/// bits: Figueroa, "When is double rounding innocuous?", 1995; p = 8 for bf16 and 11 for f16.) (Of
/// NaNs the payloads may differ.)
#pragma once

#include <cstdint>

#include "kernels/cuda/core/gemm_policies.cuh"
#include "kernels/cuda/core/ptx.cuh"
#include "kernels/cuda/core/tile.h"

namespace mk::kernels::cuda {

/// The loading thread's part.
class LateAwaits {
 public:
  /// When all loads of such a tile are issued, and at the end: the partial of the one before. Then
  /// `set` of this one.
  template <class Gate, class Shared>
  __device__ void hand_over(Gate& gate, Shared& shared) {
    if (late_.m < 0) return;
    ptx::mbarrier_wait(&shared.late.taken, parity_ ^ 1);
    gate.await_partial(late_.m, late_.n);
    ptx::mbarrier_arrive(&shared.late.there);
    parity_ ^= 1;
  }
  /// The tile that the next call is about.
  __device__ void set(const Tile& tile) { late_ = tile; }

 private:
  Tile late_{-1, -1};  ///< the last such tile
  std::uint32_t parity_ = 0;
};

/// A storing thread's part, for the rows of math warpgroup `warpgroup`.
template <class Config>
class LateAdds {
 public:
  /// `warpgroup`: the math warpgroup whose rows this thread stores.
  __device__ explicit LateAdds(int warpgroup) : warpgroup_(warpgroup) {}

  /// Whether there is one before this one: its buffers are needed for that then.
  __device__ bool due() const { return late_.m >= 0; }
  /// Adds what is due, through the buffers from `first` (a RingPosition) on, which nobody else
  /// uses. Returns when they are read.
  template <class Store, class Shared, class Position>
  __device__ void add(Store& store, Shared& shared, const Position& first) {
    static_assert(Config::kStagingBuffers >= Config::kPieces, "a whole tile's rows are brought");
    std::uint64_t* const full = &shared.late.full[warpgroup_];
    const auto for_each_piece = [&](auto&& what) {
      Position at = first;
      for (int piece = 0; piece < Config::kPieces; ++piece, at.advance()) {
        what(Piece{late_.m, late_.n, warpgroup_ * kWarpgroupRows,
                   piece_column(piece, Config::kBlockN), shared.piece[warpgroup_][at.slot]});
      }
    };
    const auto load = [&](auto&& what) {
      ptx::mbarrier_arrive_expect(full, Config::kPieces * Config::kPieceBytes);
      for_each_piece(what);
      ptx::mbarrier_wait(full, loads_++ % 2);
    };
    ptx::mbarrier_wait(&shared.late.there, parity_);
    ptx::mbarrier_arrive(&shared.late.taken);
    parity_ ^= 1;
    // What the loading thread has acquired.
    ptx::fence_acquired_to_async();
    load([&](const Piece& piece) { store.load_partial(piece, full); });
    // What it is added to is in place.
    ptx::bulk_wait<0>();
    ptx::may_dawdle();
    for_each_piece([&](const Piece& piece) { store.add(piece); });
    ptx::bulk_commit();
    if constexpr (Store::kForwards) {
      ptx::bulk_wait<0>();
      load([&](const Piece& piece) { store.load_sum(piece, full); });
      ptx::may_dawdle();
      for_each_piece([&](const Piece& piece) { store.forward(piece); });
      ptx::bulk_commit();
    }
    ptx::bulk_wait_read<0>();
  }
  /// After that, when the buffers have been given back.
  template <class Store>
  __device__ void done(Store& store) const {
    if constexpr (Store::kForwards) store.sum_done(late_, warpgroup_);
  }
  /// The tile that the next call is about.
  __device__ void set(const Tile& tile) { late_ = tile; }

 private:
  const int warpgroup_;
  Tile late_{-1, -1};  ///< the last such tile
  std::uint32_t parity_ = 0;
  std::uint32_t loads_ = 0;
};

}  // namespace mk::kernels::cuda
