/// \file
/// The output store of operators whose tiles go into packed slots, in this GPU's memory or a
/// peer's, each shown by its tile_ready flag.
#pragma once

#include <algorithm>
#include <cuda/atomic>

#include "kernels/comm/rank_context.h"
#include "kernels/cuda/core/gemm_core.cuh"
#include "kernels/cuda/transport/pace.cuh"
#include "shm/flag.h"

namespace mk::kernels::cuda {

/// Where a tile goes: into [plane][tile][row][column] of a map of packed tiles, or, where `tile` is
/// negative, to (row, column) of a matrix. Rows and columns of the core's tile that are not the
/// schedule's are clipped by the map. In a matrix they are right, and somebody else stores the
/// same. So of tiles that are accumulated there are none.
struct MappedPlace {
  const CUtensorMap* map;
  int plane;
  int tile;
  int row;
  int column;

  static __device__ MappedPlace of_matrix(const CUtensorMap* map, const TileRect& rect) {
    return {map, 0, -1, static_cast<int>(rect.row), static_cast<int>(rect.column)};
  }
};

/// Where the other rank's partials of this rank's own tiles lie here, of orders that add them.
struct PartialsPlace {
  CUtensorMap slots;     ///< [source][tile]
  std::uint32_t source;  ///< the other rank
};

/// What the places of tiles go by: a PlaceView (comm/tile_worker.h), with the maps.
template <class ScheduleType, class PlaceMaps>
struct PlaceParams {
  using Schedule = ScheduleType;
  Schedule schedule;
  World world;
  std::uint32_t banks;
  bool accumulates;
  PlaceMaps maps;
  std::byte* workspaces[shm::kLocalRanksMax];
};

/// The pace at which a block's tiles go to other ranks (FrameArguments::piece_ns), all but its last
/// one: somebody waits for that.
struct StorePace {
  std::uint32_t piece_ns;
  std::uint32_t tiles;    ///< of the launch
  std::uint32_t workers;  ///< compute blocks, which take them in turn
};

/// `Places`: the operator's TilePlaces (comm/tile_worker.h), and
///
///     using Params = PlaceParams<...>;
///     static MappedPlace map(const Params&, const TilePlace&, std::uint32_t epoch);
///     static const CUtensorMap* other_out(const Params&);    where sums are forwarded: the map of
///                                                            the other rank's matrix
template <class Config, class Places>
class PackedStore {
 public:
  struct Params {
    typename Places::Params places;
    PartialsPlace partials;
    StorePace pace;
    const std::uint32_t* last_epoch;
    const std::uint32_t* stop;  ///< the launch has failed: what is stored now is nothing
  };
  /// `Arguments`: OperatorArguments with the maps as `places`.
  template <class Arguments>
  static Params params(const typename Places::Params::Schedule& schedule,
                       const Arguments& arguments) {
    const RankContext& context = arguments.launch.context;
    Params made{{schedule,
                 context.world,
                 arguments.launch.banks,
                 arguments.launch.accumulates_own_tiles(),
                 arguments.places,
                 {}},
                {arguments.partials, 1 - context.world.local},
                {arguments.frame.piece_ns, schedule.tiles(), arguments.launch.blocks.compute},
                &arguments.frame.state->epoch,
                &arguments.frame.state->local.stop};
    std::copy_n(context.workspaces, context.world.locals, made.places.workspaces);
    return made;
  }
  static constexpr int kSharedWords = 4;
  static constexpr bool kForwards = Places::kForwards;

  /// `gate`: the gate's shared memory (BlockGateShared).
  template <class GateShared>
  __device__ PackedStore(const Params& params, std::uint32_t* words, const GateShared& gate)
      : params_(params),
        in_vain_(gate.in_vain),
        halves_done_(reinterpret_cast<std::uint64_t*>(words)),
        halves_summed_(halves_done_ + 1),
        epoch_(*params.last_epoch + 1),
        next_step_(blockIdx.x) {}

  __device__ void put(const Piece& piece) {
    const StorePace& pace = params_.pace;
    if (piece.column == 0) {
      find_place({piece.m, piece.n});
      next_step_ += pace.workers;
    }
    const bool leaves = ready_ != nullptr && !within_rank_;
    if (pace.piece_ns != 0 && leaves && next_step_ < pace.tiles) pace_.take(pace.piece_ns);
    to_place<cute::SM90_TMA_STORE_2D, cute::SM90_TMA_STORE_4D>(piece);
  }

  __device__ void tile_done(int m, int n, int warpgroup) {
    if (!is_last_half(halves_done_, warpgroup)) return;
    // A warp without rows has put nothing.
    if (at_.m != m || at_.n != n) find_place({m, n});
    if (ready_ == nullptr) return;
    ptx::may_dawdle();
    if (within_rank_) {
      ptx::store_release_gpu(ready_, epoch_);
    } else {
      shm::flag_publish(ready_, epoch_);
    }
  }

  // --- Of orders that add ---

  __device__ void load_partial(const Piece& piece, std::uint64_t* full) {
    if (piece.column == 0) find_place({piece.m, piece.n});
    const std::uint32_t tile = Places::owned_tile(params_.places, {piece.m, piece.n});
    cute::SM90_TMA_LOAD_4D::copy(&params_.partials.slots, full, kHint, to(piece), piece.column,
                                 piece.row, static_cast<int>(tile),
                                 static_cast<int>(params_.partials.source));
  }
  __device__ void add(const Piece& piece) const {
    to_place<cute::SM90_TMA_REDUCE_ADD_2D, cute::SM90_TMA_REDUCE_ADD_4D>(piece);
  }
  __device__ void load_sum(const Piece& piece, std::uint64_t* full) const {
    cute::SM90_TMA_LOAD_2D::copy(place_.map, full, kHint, to(piece), place_.column + piece.column,
                                 place_.row + piece.row);
  }
  __device__ void forward(const Piece& piece) const {
    if (!holds(piece)) return;
    cute::SM90_TMA_STORE_2D::copy(Places::other_out(params_.places), piece.bytes,
                                  place_.column + piece.column, place_.row + piece.row);
  }
  __device__ void sum_done(const Tile& tile, int warpgroup) const {
    if (!is_last_half(halves_summed_, warpgroup)) return;
    ptx::may_dawdle();
    const std::uint64_t flag = Places::out_ready(params_.places, tile);
    shm::store_release_all(
        params_.places.world.locals,
        [&](std::uint32_t local) {
          return reinterpret_cast<std::uint32_t*>(params_.places.workspaces[local] + flag);
        },
        epoch_);
  }

  __device__ void finish() {}

 private:
  static constexpr auto kHint = static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);

  __device__ static void* to(const Piece& piece) { return const_cast<void*>(piece.bytes); }
  /// Another rank that a wait of this one has missed may still be in its last launch, and read its
  /// slots. Nor is its C to be touched. The gate told before it had the tile's last stage, or the
  /// partial, loaded.
  __device__ void find_place(const Tile& tile) {
    at_ = tile;
    const TilePlace found = Places::place(params_.places, tile);
    place_ = Places::map(params_.places, found, epoch_);
    rows_ = in_vain_ != 0 ? 0 : static_cast<int>(found.rows);
    columns_ = static_cast<int>(found.columns);
    ready_ = found.ready;
    within_rank_ = found.within_rank;
  }
  __device__ bool holds(const Piece& piece) const {
    return piece.row < rows_ && piece.column < columns_;
  }
  /// By these instructions, for a matrix and for packed tiles.
  template <class ToMatrix, class ToTiles>
  __device__ void to_place(const Piece& piece) const {
    if (!holds(piece)) return;
    const int column = place_.column + piece.column;
    const int row = place_.row + piece.row;
    if (place_.tile < 0) {
      ToMatrix::copy(place_.map, piece.bytes, column, row);
    } else {
      ToTiles::copy(place_.map, piece.bytes, column, row, place_.tile, place_.plane);
    }
  }
  /// When what this warp stored has arrived: whether the tile's other half was there before, and
  /// the launch goes well. `halves`: tiles done, one 32-bit counter per warpgroup in one word. The
  /// later of the two for this tile sees the other's count.
  __device__ bool is_last_half(std::uint64_t* halves, int warpgroup) const {
    ptx::bulk_wait<0>();
    const ::cuda::atomic_ref<std::uint64_t, ::cuda::thread_scope_block> done(*halves);
    const std::uint64_t before =
        done.fetch_add(1ull << (32 * warpgroup), ::cuda::memory_order_acq_rel);
    const auto mine = static_cast<std::uint32_t>(before >> (32 * warpgroup)) + 1;
    const auto other = static_cast<std::uint32_t>(before >> (32 * (1 - warpgroup)));
    return other >= mine && shm::load_relaxed(params_.stop) == 0;
  }

  const Params& params_;
  const std::uint32_t& in_vain_;
  std::uint64_t* halves_done_;
  std::uint64_t* halves_summed_;
  std::uint32_t epoch_;
  std::uint32_t next_step_;  ///< of this block's tiles, behind the present one
  Pace pace_{0};
  Tile at_{-1, -1};
  // Of that tile:
  MappedPlace place_;
  int rows_;  ///< pieces from here on hold nothing of it
  int columns_;
  std::uint32_t* ready_;  ///< shows that it is there; null: nobody waits for it
  bool within_rank_;      ///< only this rank's blocks look at that
};

}  // namespace mk::kernels::cuda
