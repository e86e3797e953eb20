/// \file
/// The way of product rows out of a compute block: a row's sums times its routing weight go to
/// staging, and from there to the token's slot at its owner. Rows that lie side by side in a tile
/// belong to any tokens, so each leaves by itself. The math warpgroups lay them out whole: 512
/// bytes at a time cost a quarter of the copies that boxes of 128 do.
#pragma once

#include <cstdint>

#include "kernels/cuda/core/gemm_core.cuh"
#include "kernels/cuda/core/grouped_policies.cuh"
#include "kernels/ops/combine/block.h"
#include "kernels/ops/combine/sm90_arguments.h"

namespace mk::kernels::cuda {

/// A piece's part of a row. In staging 16 bytes lie between rows, so that those of a stmatrix lie
/// in different banks.
template <CombinePartials kPartials>
struct StagedRow {
  static constexpr bool kF32 = kPartials == CombinePartials::kF32;
  static constexpr int kPartialBytes = kF32 ? 4 : 2;
  /// In fp32 half a tile fits. That takes two buffers: one is given back when the next is full.
  static constexpr int kBuffers = kF32 ? 2 : 1;
  static constexpr int kBytes = kF32 ? 256 : 512;
  static constexpr int kStride = kBytes + 16;
  static constexpr int kColumns = kBytes / kPartialBytes;
};

template <class Element, BLayout kB, CombinePartials kPartials>
struct CombineConfig : GemmConfig<Element, kB, kCombineTileRows, kCombineTileColumns, 3, 1,
                                  StagedRow<kPartials>::kBuffers> {
  static constexpr int kPieceBytes = kWarpgroupRows * StagedRow<kPartials>::kStride;
  static constexpr int kIoRegisters = 88;  ///< the store's addresses take more than a box does
};

/// A product row's destination, in a word: its slot's number, and the local rank of its owner.
struct SlotPlace {
  static constexpr std::uint32_t kNowhere = 0xffffffff;
  /// A rank has fewer slots than 1 << kSlotBits.
  static constexpr std::uint32_t kSlotBits = 28;
  static_assert(shm::kLocalRanksMax <= 1u << (32 - kSlotBits));

  static __device__ std::uint32_t of(const CombineGeometry& plan, const MoeRow& row) {
    const std::uint32_t node = row.rank / plan.locals;
    const std::uint32_t local = row.rank - node * plan.locals;
    const auto slot = static_cast<std::uint32_t>(
        CombineSchedule::slot_index(plan.shape, node, row.token, row.slot));
    return RowIndex::is_possible(plan, row) ? local << kSlotBits | slot : kNowhere;
  }
  static __device__ std::uint32_t local(std::uint32_t place) { return place >> kSlotBits; }
  static __device__ std::uint32_t slot(std::uint32_t place) {
    return place & ((1u << kSlotBits) - 1);
  }
};

/// A row's sums times its routing weight: rounded, or in fp32 as they are.
template <CombinePartials kPartials>
class RowWeights {
  using Row = StagedRow<kPartials>;

 public:
  struct Params {
    const MoeRow* rows;
  };
  static constexpr int kSumsPerOutput = 1;
  static constexpr bool kForms = true;
  static constexpr int kColumns = Row::kColumns;  ///< of a piece

  __device__ RowWeights(const Params& params, int /*worker*/) : params_(params) {}

  static __device__ int pieces(const Params&) { return kCombineTileColumns / kColumns; }
  static __device__ int piece_columns(const Params&) { return kColumns; }

  /// This thread's rows of the tile are `row` and the one 8 below. (One that is not the tile's is
  /// not stored.)
  __device__ __forceinline__ void begin(const GroupedTile& tile, int row) {
#pragma unroll
    for (int half = 0; half < 2; ++half) weight_[half] = row_of(tile, row + 8 * half).weight;
  }
  /// Tells the store where that row goes.
  __device__ __forceinline__ void tell_place(const CombineGeometry& plan, const GroupedTile& tile,
                                             int row, std::uint32_t* places) const {
    // (It is in this SM's cache since `begin`, and takes no registers from the sums till then.)
    const auto words = __ldg(reinterpret_cast<const uint4*>(&row_of(tile, row)));
    places[row] = SlotPlace::of(plan, {words.x, words.y, words.z, 0.0f});
  }
  /// Stores this warp's sums of kColumns columns from `column` on; `rows`: the first of its 16
  /// rows, in shared memory.
  template <class Element>
  __device__ __forceinline__ void store(const float* sums, int column, std::uint32_t rows) const {
    const std::uint32_t lane = threadIdx.x % 32;
    const float* v = sums + column / 8 * 4;
    if constexpr (Row::kF32) {
      const std::uint32_t at = rows + lane / 4 * Row::kStride + lane % 4 * 8;
#pragma unroll
      for (int eight = 0; eight < kColumns / 8; ++eight, v += 4) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          ptx::store_two(at + half * (8 * Row::kStride) + eight * 32, v[2 * half] * weight_[half],
                         v[2 * half + 1] * weight_[half]);
        }
      }
    } else {
      // One stmatrix: 16 columns of the rows, lane l has the address of row l % 16 of half l / 16.
      const std::uint32_t at = rows + lane % 16 * Row::kStride + lane / 16 * 16;
#pragma unroll
      for (int pair = 0; pair < kColumns / 16; ++pair, v += 8) {
        std::uint32_t packed[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          packed[i] = pack_two<Element>(v[2 * i] * weight_[i % 2], v[2 * i + 1] * weight_[i % 2]);
        }
        ptx::store_matrices(at + pair * 32, packed[0], packed[1], packed[2], packed[3]);
      }
    }
  }

 private:
  __device__ __forceinline__ const MoeRow& row_of(const GroupedTile& tile, int row) const {
    return params_.rows[tile.row + (row < tile.rows ? row : 0)];
  }

  const Params& params_;
  float weight_[2];  ///< of the thread's rows
};

/// The core stages these so, in place of its own (tile_staging.cuh). The tile is not const so that
/// this one suits the call better: to the compiler neither is more special.
template <class Config, CombinePartials kPartials, class TileType, class Shared>
__device__ __forceinline__ void stage_tile(RowWeights<kPartials>& epilogue,
                                           float (&acc)[Config::kAccumulators], TileType& tile,
                                           Shared& shared, int warpgroup,
                                           RingPosition<Config::kStagingBuffers>& staging) {
  const int warp = static_cast<int>(__shfl_sync(0xffffffff, threadIdx.x / 32 % 4, 0));
  const int lane = threadIdx.x % 32;
  const int row = warpgroup * kWarpgroupRows + warp * 16 + lane / 4;
  epilogue.begin(tile, row);
#pragma unroll
  for (int column = 0; column < Config::kBlockN; column += RowWeights<kPartials>::kColumns) {
    ptx::mbarrier_wait(&shared.piece_empty[warpgroup][staging.slot], staging.parity ^ 1);
    // With a buffer's return the store has seen the last tile's places.
    if (column == 0 && lane % 4 < 2)
      epilogue.tell_place(shared.gate.launch().plan, tile, row + 8 * (lane % 4),
                          shared.store_words);
    const std::uint32_t piece = ptx::shared_address(shared.piece[warpgroup][staging.slot]);
    epilogue.template store<typename Config::Element>(
        acc, column, piece + warp * (16 * StagedRow<kPartials>::kStride));
    ptx::fence_shared_to_async();
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(&shared.piece_full[warpgroup][staging.slot]);
    staging.advance();
  }
}

/// Every row of a piece goes to its token's slot at its owner, a bulk store each.
template <class Config, CombinePartials kPartials>
class SlotRows {
  using Row = StagedRow<kPartials>;

 public:
  struct Params {
    std::uint32_t columns;      ///< of tiles
    const std::uint32_t* stop;  ///< the launch has failed
  };
  static constexpr int kSharedWords = Config::kBlockM;  ///< a SlotPlace for each row

  template <class GateShared>
  __device__ SlotRows(const Params& params, std::uint32_t* words, const GateShared& gate)
      : params_(params), words_(words), launch_(gate.launch()), in_vain_(gate.in_vain) {}

  __device__ void put(const Piece& piece, const GroupedTile& tile) {
    if (in_vain_ != 0) return;
    const CombineGeometry& plan = launch_.plan;
    const std::uint32_t row_bytes = plan.shape.hidden * Row::kPartialBytes;
    const std::uint32_t begin =
        static_cast<std::uint32_t>(tile.n * Config::kBlockN + piece.column) * Row::kPartialBytes;
    if (begin >= row_bytes) return;
    const std::uint32_t left = row_bytes - begin;
    const std::uint32_t bytes = left < Row::kBytes ? left : Row::kBytes;
    const std::uint64_t first = plan.layout.slots + begin;
    const int rows_left = tile.rows - piece.row;
    const int rows = rows_left < kWarpgroupRows ? rows_left : kWarpgroupRows;
    const std::uint32_t* const places = words_ + piece.row;
    const auto* from = static_cast<const std::uint8_t*>(piece.bytes);
#pragma unroll 2
    for (int row = 0; row < rows; ++row, from += Row::kStride) {
      const std::uint32_t place = places[row];
      if (place == SlotPlace::kNowhere) continue;
      std::byte* const slots = launch_.context.workspaces[SlotPlace::local(place)] + first;
      ptx::bulk_store(slots + std::uint64_t{SlotPlace::slot(place)} * row_bytes, from, bytes);
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
  const Params& params_;
  const std::uint32_t* const words_;
  const CombineLaunch& launch_;
  const std::uint32_t& in_vain_;
};

}  // namespace mk::kernels::cuda
