/// \file
/// The output store of operators whose tiles go into packed slots, in this GPU's memory or a
/// peer's, each shown by its tile_ready flag.
#pragma once

#include <algorithm>
#include <cuda/atomic>

#include "kernels/comm/rank_context.h"
#include "kernels/cuda/gemm_core.cuh"
#include "shm/flag.h"

namespace mk::kernels::cuda {

/// Where a tile goes: into [plane][tile][row][column] of a map of packed tiles, or, where `tile` is
/// negative, to (row, column) of a matrix. Rows and columns of the core's tile that are not the
/// schedule's are clipped by the map; in a matrix they are right, and somebody else stores the
/// same.
struct TilePlace {
  const CUtensorMap* map;  ///< or, `everywhere`, the first of one for each local rank
  int plane;
  int tile;
  int row;
  int column;
  int rows;  ///< pieces from here on hold nothing of the tile
  int columns;
  std::uint32_t* ready;    ///< shows that the tile is there; null: nobody waits for it
  bool within_rank;        ///< only this rank's blocks look at that
  bool everywhere;         ///< to each local rank, by each one's map
  std::uint64_t ready_at;  ///< then, in each one's workspace: shows that the tile is there
};

/// What the places of tiles go by.
template <class ScheduleType, class PlaceMaps>
struct PlaceParams {
  using Schedule = ScheduleType;
  Schedule schedule;
  World world;
  std::uint32_t banks;
  PlaceMaps maps;
  std::byte* workspaces[shm::kLocalRanksMax];
};

/// `Places` answers:
///
///     using Params = PlaceParams<...>;
///     static constexpr bool kEverywhere;   whether there are tiles that go to each local rank
///     static TilePlace place(const Params&, Tile, std::uint32_t epoch);
template <class Config, class Places>
class PackedStore {
 public:
  struct Params {
    typename Places::Params places;
    const std::uint32_t* last_epoch;
    const std::uint32_t* stop;  ///< the launch has failed: what is stored now is nothing
  };
  /// `Arguments`: OperatorArguments with the maps as `places`.
  template <class Arguments>
  static Params params(const typename Places::Params::Schedule& schedule,
                       const Arguments& arguments) {
    const RankContext& context = arguments.launch.context;
    Params made{{schedule, context.world, arguments.launch.banks, arguments.places, {}},
                &arguments.frame.state->epoch,
                &arguments.frame.state->local.stop};
    std::copy_n(context.workspaces, context.world.locals, made.places.workspaces);
    return made;
  }
  static constexpr int kSharedWords = 2;

  __device__ PackedStore(const Params& params, std::uint32_t* words)
      : params_(params),
        halves_done_(reinterpret_cast<std::uint64_t*>(words)),
        epoch_(*params.last_epoch + 1) {}

  __device__ void put(const Piece& piece) {
    if (piece.column == 0) {
      place_ = Places::place(params_.places, {piece.m, piece.n}, epoch_);
      if constexpr (Places::kEverywhere) {
        // A rank whose partials this one waited for in vain may still be in its last launch: its C
        // is not to be touched. (The gate set the word before it went on without them, with a fence
        // between.)
        if (place_.everywhere && shm::load_relaxed(params_.stop) != 0) place_.rows = 0;
      }
    }
    if (piece.row >= place_.rows || piece.column >= place_.columns) return;
    const int column = place_.column + piece.column;
    const int row = place_.row + piece.row;
    if constexpr (Places::kEverywhere) {
      if (place_.everywhere) return put_everywhere(piece, row, column);
    }
    if (place_.tile < 0) {
      cute::SM90_TMA_STORE_2D::copy(place_.map, piece.bytes, column, row);
    } else {
      cute::SM90_TMA_STORE_4D::copy(place_.map, piece.bytes, column, row, place_.tile,
                                    place_.plane);
    }
  }

  __device__ void tile_done(int /*m*/, int /*n*/, int warpgroup) {
    ptx::bulk_wait<0>();
    // Tiles done, one 32-bit counter per warpgroup in one word: the later of the two for this tile
    // sees the other's count.
    const ::cuda::atomic_ref<std::uint64_t, ::cuda::thread_scope_block> halves_done(*halves_done_);
    const std::uint64_t before =
        halves_done.fetch_add(1ull << (32 * warpgroup), ::cuda::memory_order_acq_rel);
    const auto mine = static_cast<std::uint32_t>(before >> (32 * warpgroup)) + 1;
    const auto other = static_cast<std::uint32_t>(before >> (32 * (1 - warpgroup)));
    if (other < mine || place_.ready == nullptr || shm::load_relaxed(params_.stop) != 0) return;
    ptx::may_dawdle();
    if constexpr (Places::kEverywhere) {
      if (place_.everywhere) return publish_everywhere();
    }
    if (place_.within_rank) {
      ptx::store_release_gpu(place_.ready, epoch_);
    } else {
      shm::flag_publish(place_.ready, epoch_);
    }
  }

  __device__ void finish() {}

 private:
  /// Own first, so that not everybody begins with the same rank.
  __device__ void put_everywhere(const Piece& piece, int row, int column) const {
    const World& world = params_.places.world;
    std::uint32_t local = world.local;
    for (std::uint32_t i = 0; i < world.locals; ++i) {
      cute::SM90_TMA_STORE_2D::copy(place_.map + local, piece.bytes, column, row);
      local = local + 1 < world.locals ? local + 1 : 0;
    }
  }
  __device__ void publish_everywhere() const {
    shm::store_release_all(
        params_.places.world.locals,
        [&](std::uint32_t local) {
          return reinterpret_cast<std::uint32_t*>(params_.places.workspaces[local] +
                                                  place_.ready_at);
        },
        epoch_);
  }

  const Params& params_;
  std::uint64_t* halves_done_;
  std::uint32_t epoch_;
  TilePlace place_;
};

}  // namespace mk::kernels::cuda
