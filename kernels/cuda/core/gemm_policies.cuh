/// \file
/// The two other policies of the GEMM core beside the tile order (tile.h): when a tile's inputs may
/// be loaded, and where its output goes. The types here are the plain matrix product's; an operator
/// supplies its own.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <cute/arch/copy_sm90_tma.hpp>

#include "kernels/cuda/core/activation.cuh"
#include "kernels/cuda/core/gemm_config.cuh"
#include "kernels/cuda/core/ptx.cuh"
#include "kernels/cuda/core/tile.h"

namespace mk::kernels::cuda {

/// A **readiness gate** holds back the loads of a tile until its inputs have arrived. One thread of
/// each block asks.
///
///     struct Params;
///     explicit Gate(const Params&);
///     int wait(int m, int n, int k_block);
///
/// `wait` returns when the inputs of block tile (m, n) from `k_block` on are ready, and answers up
/// to which k block (exclusive): the core asks again when it gets there. In a cluster each block
/// asks for what it loads itself, its rows of A and its share of B. A gate may have
///
///     struct Shared;                                and Gate(const Params&, Shared&)
///     void load_a(const CUtensorMap& a, uint64_t* full, uint64_t hint, void* to, int k) const;
///     void end();
///
/// shared memory of its own; rows of A that lie in several places: it then issues the load of the
/// tile it was last asked about itself (with `load_b` alike, where B is no single matrix, and `int
/// a_bytes() const`, where a tile's A is not always as large); and
/// something to do when it will not be asked again. A gate of an order with tiles of its own
/// (TileOf) has `wait(const TileType& tile, int k_block)` instead. Where
/// the order says `bool accumulates()` of the tile that it gave last, another rank's partial of it
/// is added to this product (late_adds.cuh):
///
///     void await_partial(int m, int n);             as `wait`, before the tile's partial is loaded
///
/// Where `Shared::executor` has `assist(lane)` and `end()` (WarpGateExecutor), the loading warp's
/// other lanes stand in the one from the beginning of the tiles until the thread that loads calls
/// the other.
///
/// A gate that waits must have a deadline well under ptx::kBlockDeadlineNs. When it passes, the
/// gate records who waited for what and answers kAllReady from then on. So the block runs to its
/// end on whatever the memory holds, and nothing hangs. The store must then not announce the
/// result: see there. What was acquired must be passed on to the copy engine with
/// ptx::fence_acquired_to_async() before `wait` returns.
using mk::kernels::kAllReady;

template <class Gate>
inline constexpr bool kGateLoadsA = requires(const Gate& gate, const CUtensorMap& a,
                                             std::uint64_t* full, void* to) {
  gate.load_a(a, full, std::uint64_t{}, to, 0);
};
template <class Gate>
inline constexpr bool kGateLoadsB = requires(const Gate& gate, const CUtensorMap& b,
                                             std::uint64_t* full, void* to) {
  gate.load_b(b, full, std::uint64_t{}, to, 0);
};
template <class Gate>
inline constexpr bool kGateEnds = requires(Gate& gate) {
  gate.end();
};
/// The loading warp's other lanes look at flags for the gate (leader_warp.cuh).
template <class Gate>
inline constexpr bool kGateLooksByWarp = requires(typename Gate::Shared& shared) {
  shared.executor.assist(0u);
};
template <class Gate>
inline constexpr bool kGateShares = requires {
  typename Gate::Shared;
};
template <class Gate>
struct GateSharedOf {
  struct Type {};
};
template <class Gate>
requires kGateShares<Gate>
struct GateSharedOf<Gate> {
  using Type = typename Gate::Shared;
};

/// A store that wants to see the gate's shared memory.
template <class Store, class GateShared>
inline constexpr bool kStoreSees =
    std::is_constructible_v<Store, const typename Store::Params&, std::uint32_t*, GateShared&>;

/// An order of tiles to some of which another rank's partial is added.
template <class Order>
inline constexpr bool kAccumulates = requires(const Order& order) {
  order.accumulates();
};

/// Dynamic shared memory of a block.
template <class Config, class Gate, class Store, class Order = RasterOrder>
using SharedOf = GemmShared<Config, Store::kSharedWords, typename GateSharedOf<Gate>::Type,
                            TileOf<Order>, OrderSharedOf<Order>>;

/// Inputs that are ready before the launch.
struct AlwaysReady {
  struct Params {};
  __device__ explicit AlwaysReady(const Params&) {}
  __device__ int wait(int, int, int) { return kAllReady; }
};

/// A staged piece of an output tile: 64 rows x 64 columns in shared memory, 128-byte rows, 128-byte
/// swizzle.
struct Piece {
  int m;              ///< block tile row
  int n;              ///< block tile column
  int row;            ///< first row within the tile: 0 or 64, so row / 64 is the math warpgroup
  int column;         ///< first column within the tile
  const void* bytes;  ///< shared memory
};

/// An **output store** takes the pieces of finished tiles from shared memory to where they belong.
/// Each math warpgroup has a storing warp, one thread of which calls it; the warpgroup goes on with
/// the next tile meanwhile.
///
///     struct Params;
///     static constexpr int kSharedWords;            32-bit words of shared memory it wants
///     Store(const Params&, std::uint32_t* words);   the words are zero at the start of the kernel;
///                                                   or, third, const Gate::Shared&: to see whether
///                                                   a wait of the gate has failed
///     void put(const Piece&);                       issues bulk stores; the core commits the group
///     void tile_done(int m, int n, int warpgroup);  after this warp's last put of the tile
///     void finish();                                after the last tile; the core then waits
///
/// `tile_done` may block: with ptx::bulk_wait<0>() before the release of a flag, as writes to a
/// peer demand. A tile has two storing warps, one per math warpgroup; both must have waited before
/// either may release: count them in `words`. The warpgroups may be several tiles apart when K is
/// short.
///
/// Where the order accumulates (late_adds.cuh), for all pieces of a tile of which that is true,
/// after the tile_done of a later one or at the end, `full` and shared memory as the core gives
/// them:
///
///     void load_partial(const Piece&, uint64_t* full);   has the other's partial of the piece
///                                                   brought there (all 64 x 64, swizzled)
///     void add(const Piece&);                       adds it to what `put` has stored
///     static constexpr bool kForwards;              then, if so, when that is complete:
///     void load_sum(const Piece&, uint64_t* full);  has the sum brought there,
///     void forward(const Piece&);                   stores it elsewhere, too,
///     void sum_done(const Tile&, int warpgroup);    and, as tile_done, shows it
///
/// A store of an order with tiles of its own (TileOf) has `put(const Piece&, const TileType&)` and
/// `tile_done(const TileType&, int warpgroup)` instead.
///
/// StoreToC: one TMA store per piece into row-major C; rows and columns outside C are not written.
template <class Config>
struct StoreToC {
  struct Params {
    CUtensorMap c;  ///< C as [M,N], box 64 x 64, 128-byte swizzle
  };
  static constexpr int kSharedWords = 0;

  __device__ StoreToC(const Params& params, std::uint32_t* /*words*/) : params_(params) {}

  __device__ void put(const Piece& piece) {
    cute::SM90_TMA_STORE_2D::copy(&params_.c, piece.bytes, piece.n * Config::kBlockN + piece.column,
                                  piece.m * Config::kBlockM + piece.row);
  }
  __device__ void tile_done(int, int, int) {}
  __device__ void finish() {}

 private:
  const Params& params_;
};

/// An **epilogue** makes what is staged from the fp32 sums; all threads of the math warpgroups have
/// one.
///
///     struct Params;
///     static constexpr int kSumsPerOutput;          columns of sums that make one of C
///     explicit Epilogue(const Params&);
///     void begin(const TileType& tile, int row);    a tile's sums are complete; the thread's rows
///                                                   within it are `row` and `row` + 8
///     void pack<Element>(float* sums, int column, uint32_t (&packed)[4]) const;
///
/// `pack` makes 16 columns of the staged tile from `column` on, as stmatrix takes them. With t the
/// thread's lane % 4, packed[0] is (row, column + 2 t and the next), packed[1] the same of row + 8,
/// packed[2] and [3] the same 8 columns on. sums[column / 8 * 4 + i] is, in the order of i, (row,
/// column + 2 t), (row, the next), (row + 8, ...), (row + 8, the next). The whole warp calls it. It
/// works in `sums` itself rather than in a copy: to the compiler they are alive until the next
/// tile. There are no registers for both.
///
/// An epilogue that has kForms chooses at launch among several ways to stage a tile: see
/// finishing_epilogue.cuh.
///
/// RoundedSums: C is the rounded sums.
template <class Epilogue>
inline constexpr bool kHasForms = requires {
  requires Epilogue::kForms;
};
struct RoundedSums {
  struct Params {};
  static constexpr int kSumsPerOutput = 1;
  __device__ explicit RoundedSums(const Params&) {}
  template <class TileType>
  __device__ void begin(const TileType&, int) {}
  template <class Element>
  static __device__ __forceinline__ void pack(const float* sums, int column,
                                              std::uint32_t (&packed)[4]) {
    const float* v = sums + column / 8 * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) packed[i] = pack_two<Element>(v[2 * i], v[2 * i + 1]);
  }
};

}  // namespace mk::kernels::cuda
