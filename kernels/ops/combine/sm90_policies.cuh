/// \file
/// GEMM+Combine for the GEMM core: row tiles come in the index's order, which begins when the
/// index is made. Sums are multiplied by their row's routing weight. Rows are stored one by one
/// into their tokens' slots. Loads are the grouped product's (kernels/cuda/core).
#pragma once

#include <cstdint>

#include "kernels/comm/row_bands.h"
#include "kernels/cuda/core/gemm_core.cuh"
#include "kernels/cuda/core/grouped_policies.cuh"
#include "kernels/cuda/core/tile_feed.cuh"
#include "kernels/cuda/skeleton/block_gate.cuh"
#include "kernels/ops/combine/block.h"
#include "kernels/ops/combine/sm90_arguments.h"

namespace mk::kernels::cuda {

/// Bands of row tiles, of each its columns (banded_tile); each tile goes to the
/// block that is free first. Made after the gate, which has awaited the index. A tile's `m` is its
/// row tile's number.
class CombineTiles {
 public:
  struct Params {
    const CombineWords* words;
    const CombineTile* tiles;
    const std::uint32_t* order;
    const std::uint32_t* stop;  ///< the launch has failed
    std::uint32_t columns;      ///< of tiles
    Divisor band_tiles;
    std::uint32_t* taken;  ///< DeviceState::tiles_taken
  };
  using TileType = GroupedTile;
  static constexpr bool kTaken = true;

  __device__ CombineTiles(const Params& params, int worker, int workers)
      : params_(params),
        worker_(static_cast<std::uint32_t>(worker)),
        workers_(static_cast<std::uint32_t>(workers)) {}

  __device__ bool next(GroupedTile* tile) {
    if (shm::load_relaxed(params_.stop) != 0) return false;
    const std::uint32_t row_tiles = params_.words->tiles;
    std::uint32_t step;
    const bool some =
        take_step(first_, worker_, workers_, params_.taken, row_tiles * params_.columns, &step);
    first_ = false;
    if (!some) return false;
    const auto [turn, column] =
        banded_tile<CombineSchedule::kBand>(step, row_tiles, params_.band_tiles);
    const std::uint32_t number = params_.order[turn];
    const CombineTile& from = params_.tiles[number];
    *tile = {static_cast<int>(number), static_cast<int>(column), static_cast<int>(from.expert),
             static_cast<int>(from.row), static_cast<int>(from.rows)};
    return true;
  }

 private:
  const Params& params_;
  std::uint32_t worker_;
  std::uint32_t workers_;
  bool first_ = true;
};

/// Waits as the compute role does: for the index; the rows were there before the launch.
template <class Config>
class CombineGate : public GroupedInputs<Config> {
  using Inputs = GroupedInputs<Config>;

 public:
  using Params = typename Inputs::Params;
  using Shared = BlockGateShared<CombineLaunch, CombineBlock>;

  __device__ CombineGate(const Params& params, Shared& shared) : Inputs(params) {
    auto& block = shared.make_block();
    if (!block.await_indexed(block.world.local)) shared.in_vain = 1;
  }
};

/// A row's sums times its routing weight, which are then rounded.
class RowWeights {
 public:
  struct Params {
    const MoeRow* rows;
  };
  static constexpr int kSumsPerOutput = 1;

  __device__ explicit RowWeights(const Params& params) : params_(params) {}

  /// (A row that is not the tile's is not stored.)
  __device__ void begin(const GroupedTile& tile, int row) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = row + 8 * half < tile.rows ? row + 8 * half : 0;
      weight_[half] = params_.rows[tile.row + at].weight;
    }
  }
  template <class Element>
  __device__ __forceinline__ void pack(const float* sums, int column,
                                       std::uint32_t (&packed)[4]) const {
    const float* const v = sums + column / 8 * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      packed[i] = pack_two<Element>(v[2 * i] * weight_[i % 2], v[2 * i + 1] * weight_[i % 2]);
  }

 protected:
  const Params& params_;
  float weight_[2];  ///< of the thread's rows
};

/// The same, not rounded.
class RowWeightsF32 : public RowWeights {
 public:
  using RowWeights::RowWeights;
  __device__ RowWeightsF32(const Params& params, int /*worker*/) : RowWeights(params) {}

  static constexpr bool kForms = true;
  static constexpr int kColumns = kPieceColumns / 2;  ///< of a piece, whose rows are 128 bytes
  static __device__ int pieces(const Params&) { return kCombineTileColumns / kColumns; }
  static __device__ int piece_columns(const Params&) { return kColumns; }

  /// Stores this thread's sums of kColumns columns from `column` on into the piece at `piece` in
  /// shared memory, swizzled; `row`: its first row there, with the one 8 below.
  __device__ __forceinline__ void store(const float* sums, int column, std::uint32_t piece,
                                        std::uint32_t row) const {
    const std::uint32_t t = threadIdx.x % 4;
#pragma unroll
    for (int eight = 0; eight < kColumns / 8; ++eight) {
      const float* const v = sums + (column / 8 + eight) * 4;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::uint32_t at = row + half * 8;
        const std::uint32_t vector = (eight * 2 + t / 2) ^ (at % 8);
        ptx::store_two(piece + at * 128 + (vector << 4) + t % 2 * 8, v[2 * half] * weight_[half],
                       v[2 * half + 1] * weight_[half]);
      }
    }
  }
};

/// How the core stages these, in place of its own (tile_staging.cuh). The tile is not const so that
/// this one suits the call better: to the compiler neither is more special.
template <class Config, class TileType, class Shared>
__device__ __forceinline__ void stage_tile(RowWeightsF32& epilogue,
                                           float (&acc)[Config::kAccumulators], TileType& tile,
                                           Shared& shared, int warpgroup,
                                           RingPosition<Config::kStagingBuffers>& staging) {
  const int warp = static_cast<int>(__shfl_sync(0xffffffff, threadIdx.x / 32 % 4, 0));
  const int lane = threadIdx.x % 32;
  const int row = warp * 16 + lane / 4;
  epilogue.begin(tile, warpgroup * kWarpgroupRows + row);
#pragma unroll
  for (int column = 0; column < Config::kBlockN;
       column += RowWeightsF32::kColumns, staging.advance()) {
    ptx::mbarrier_wait(&shared.piece_empty[warpgroup][staging.slot], staging.parity ^ 1);
    epilogue.store(acc, column, ptx::shared_address(shared.piece[warpgroup][staging.slot]), row);
    ptx::fence_shared_to_async();
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(&shared.piece_full[warpgroup][staging.slot]);
  }
}

/// Every row of a piece goes to its token's slot at its owner: a TMA store of 128 bytes each, as
/// rows that lie side by side here belong to any tokens.
template <class Config, CombinePartials kPartials>
class SlotRows {
 public:
  struct Params {
    CUtensorMap slots[shm::kLocalRanksMax];  ///< as matrices of two-byte elements
    std::uint32_t columns;                   ///< of tiles
    const std::uint32_t* stop;               ///< the launch has failed
  };
  static constexpr int kSharedWords = 2 * kWarpgroupRows;
  /// A place is a slot's number and the local rank. A rank has fewer slots than 1 << kSlotBits.
  static constexpr std::uint32_t kSlotBits = 28;
  static_assert(shm::kLocalRanksMax <= 1u << (32 - kSlotBits));

  template <class GateShared>
  __device__ SlotRows(const Params& params, std::uint32_t* words, const GateShared& gate)
      : params_(params), words_(words), launch_(gate.launch()), in_vain_(gate.in_vain) {}

  __device__ void put(const Piece& piece, const GroupedTile& tile) {
    if (in_vain_ != 0) return;
    std::uint32_t* const places = words_ + piece.row;
    const int left = tile.rows - piece.row;
    const int rows = left < kWarpgroupRows ? left : kWarpgroupRows;
    if (piece.column == 0) find_places(launch_.rows + tile.row + piece.row, rows, places);
    constexpr int kHalves = kPartials == CombinePartials::kF32 ? 2 : 1;
    const int column = (tile.n * Config::kBlockN + piece.column) * kHalves;
    // What lies behind a row's end the map leaves out, but not all of a box.
    if (column >= static_cast<int>(launch_.plan.shape.hidden) * kHalves) return;
    const auto* from = static_cast<const std::uint8_t*>(piece.bytes);
#pragma unroll 4
    for (int row = 0; row < rows; ++row, from += 128) {
      const std::uint32_t place = places[row];
      if (place == kNowhere) continue;
      cute::SM90_TMA_STORE_2D::copy(&params_.slots[place >> kSlotBits], from, column,
                                    static_cast<int>(place & ((1u << kSlotBits) - 1)));
    }
  }

  /// A row tile is there when both warpgroups have stored their rows of all its columns.
  __device__ void tile_done(const GroupedTile& tile, int /*warpgroup*/) {
    ptx::bulk_wait<0>();
    if (in_vain_ != 0 || shm::load_relaxed(params_.stop) != 0) return;
    const World& world = launch_.context.world;
    const CombineLayout& layout = launch_.plan.layout;
    const auto number = static_cast<std::uint32_t>(tile.m);
    auto* const parts = reinterpret_cast<std::uint32_t*>(launch_.context.workspaces[world.local] +
                                                         layout.tile_parts);
    if (!last_of(&parts[number], params_.columns * Config::kMathWarpgroups)) return;
    ptx::may_dawdle();
    const std::uint32_t flag = world.local * launch_.plan.tiles_max + number;
    shm::store_release_all(
        world.locals,
        [&](std::uint32_t local) {
          return reinterpret_cast<std::uint32_t*>(launch_.context.workspaces[local] +
                                                  layout.tile_ready) +
                 flag;
        },
        launch_.epoch);
  }
  __device__ void finish() {}

 private:
  static constexpr std::uint32_t kNowhere = 0xffffffff;

  __device__ void find_places(const MoeRow* rows, int count, std::uint32_t* places) const {
    const CombineGeometry& plan = launch_.plan;
#pragma unroll 4
    for (int i = 0; i < count; ++i) {
      const auto words = __ldg(reinterpret_cast<const uint4*>(rows + i));
      const MoeRow row{words.x, words.y, words.z, 0.0f};
      const std::uint32_t node = row.rank / plan.locals;
      const std::uint32_t local = row.rank - node * plan.locals;
      const auto slot = static_cast<std::uint32_t>(
          CombineSchedule::slot_index(plan.shape, node, row.token, row.slot));
      places[i] = RowIndex::is_possible(plan, row) ? local << kSlotBits | slot : kNowhere;
    }
  }

  const Params& params_;
  std::uint32_t* const words_;
  const CombineLaunch& launch_;
  const std::uint32_t& in_vain_;
};

}  // namespace mk::kernels::cuda
