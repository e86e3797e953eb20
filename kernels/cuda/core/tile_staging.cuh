/// \file
/// How a tile's sums go from registers to shared memory: in pieces, by the math warpgroups, as its
/// epilogue makes them.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/core/gemm_config.cuh"
#include "kernels/cuda/core/gemm_policies.cuh"
#include "kernels/cuda/core/ptx.cuh"

namespace mk::kernels::cuda {

/// Where one walks a ring of kSlots barriers: the slot and the parity of the phase it is in.
template <int kSlots>
struct RingPosition {
  int slot = 0;
  std::uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    slot = slot == kSlots - 1 ? 0 : slot + 1;
    parity ^= slot == 0;
  }
  __device__ __forceinline__ int previous() const { return slot == 0 ? kSlots - 1 : slot - 1; }
};

/// How a tile's sums are staged: in so many pieces of so many columns.
template <class Epilogue, class Config>
__device__ __forceinline__ int pieces_of(const typename Epilogue::Params& params) {
  if constexpr (kHasForms<Epilogue>) {
    return Epilogue::pieces(params);
  } else {
    return Config::kPieces / Epilogue::kSumsPerOutput;
  }
}
/// The first column of such a piece.
template <class Epilogue, class Config>
__device__ __forceinline__ int piece_column_of(const typename Epilogue::Params& params, int piece) {
  if constexpr (kHasForms<Epilogue>) {
    static_assert(Config::kBlockN % kPieceColumns == 0, "its pieces do not overlap");
    return piece * Epilogue::piece_columns(params);
  } else {
    return piece_column(piece, Config::kBlockN / Epilogue::kSumsPerOutput);
  }
}

/// Stages the tile in `acc`, by all threads of math warpgroup `warpgroup`; `staging` is where its
/// ring of pieces stands.
template <class Config, class Epilogue, class TileType, class Shared>
__device__ __forceinline__ void stage_tile(Epilogue& epilogue, float (&acc)[Config::kAccumulators],
                                           const TileType& tile, Shared& shared, int warpgroup,
                                           RingPosition<Config::kStagingBuffers>& staging) {
  using Element = typename Config::Element;
  constexpr int kOutPieces = Config::kPieces / Epilogue::kSumsPerOutput;
  const int warp = static_cast<int>(__shfl_sync(0xffffffff, threadIdx.x / 32 % 4, 0));
  const int lane = threadIdx.x % 32;
  // One stmatrix stores two 8-column groups of this warp's 16 rows: lane l gives the address of
  // row l % 16 of group l / 16. The 16-byte column is swizzled by the row, as the copy engine
  // expects.
  const int row = warp * 16 + lane % 16;
  const int group = lane / 16;
  const std::uint32_t row_bytes = row * 128;
  // The tile in kCount pieces, each written by `write(piece, its address)`.
  const auto stage = [&](auto count, auto&& write) {
    constexpr int kCount = decltype(count)::value;
#pragma unroll
    for (int piece = 0; piece < kCount; ++piece, staging.advance()) {
      ptx::mbarrier_wait(&shared.piece_empty[warpgroup][staging.slot], staging.parity ^ 1);
      write(piece, ptx::shared_address(shared.piece[warpgroup][staging.slot]));
      ptx::fence_shared_to_async();
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(&shared.piece_full[warpgroup][staging.slot]);
    }
  };
  // The same of rounded sums: `pack(column, packed)` makes 16 columns, each once, as it works in
  // the sums themselves. So the last two pieces of a tile share what they both have.
  const auto stage_packed = [&](auto count, auto&& pack) {
    constexpr int kCount = decltype(count)::value;
    constexpr int kColumns = Config::kBlockN / Epilogue::kSumsPerOutput;
    constexpr bool kOverlaps = kColumns % kPieceColumns != 0;
    [[maybe_unused]] std::uint32_t shown_twice[2][4];
    stage(count, [&](int piece, std::uint32_t at) {
#pragma unroll
      for (int pair = 0; pair < kPieceColumns / 16; ++pair) {
        const std::uint32_t address = at + row_bytes + (((pair * 2 + group) ^ (row % 8)) << 4);
        std::uint32_t packed[4];
        if (kOverlaps && piece == kCount - 1 && pair < 2) {
#pragma unroll
          for (int i = 0; i < 4; ++i) packed[i] = shown_twice[pair][i];
        } else {
          pack(piece_column(piece, kColumns) + pair * 16, packed);
        }
        if constexpr (kOverlaps) {
          if (piece == kCount - 2 && pair >= 2) {
#pragma unroll
            for (int i = 0; i < 4; ++i) shown_twice[pair - 2][i] = packed[i];
          }
        }
        ptx::store_matrices(address, packed[0], packed[1], packed[2], packed[3]);
      }
    });
  };
  using Pieces = std::integral_constant<int, kOutPieces>;
  if constexpr (kHasForms<Epilogue>) {
    if (epilogue.rounds_only()) {
      stage_packed(Pieces{}, [&](int column, std::uint32_t(&packed)[4]) {
        RoundedSums::template pack<Element>(acc, column, packed);
      });
    } else if (epilogue.stages_f32()) {
      stage(std::integral_constant<int, 2 * Config::kPieces>{}, [&](int piece, std::uint32_t at) {
        epilogue.store_f32(acc, piece * (kPieceColumns / 2), at, warp * 16 + lane / 4);
      });
    } else if (epilogue.is_gated()) {
      // Narrower kernels are not chosen for gated products (OperatorBase::start).
      if constexpr (Config::kPieces % 2 == 0) {
        epilogue.begin(tile);
        stage_packed(std::integral_constant<int, Config::kPieces / 2>{},
                     [&](int column, std::uint32_t(&packed)[4]) {
                       epilogue.template pack_gated<Element>(acc, column, packed);
                     });
      }
    } else {
      epilogue.begin(tile);
      stage_packed(Pieces{}, [&](int column, std::uint32_t(&packed)[4]) {
        epilogue.template pack<Element>(acc, column, packed);
      });
    }
  } else {
    epilogue.begin(tile, warpgroup * kWarpgroupRows + warp * 16 + lane / 4);
    stage_packed(Pieces{}, [&](int column, std::uint32_t(&packed)[4]) {
      epilogue.template pack<Element>(acc, column, packed);
    });
  }
}

}  // namespace mk::kernels::cuda
