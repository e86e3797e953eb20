/// \file
/// What the GEMM core is compiled for: element type, layout of B, tile, stages, cluster; and what
/// follows from it (threads, registers, shared memory, the wgmma instruction).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>
#include <cute/arch/mma_sm90_desc.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <type_traits>
#include <utility>

#include "kernels/cuda/core/gemm_types.h"
#include "kernels/cuda/core/ptx.cuh"
#include "kernels/cuda/core/tile_feed.cuh"

namespace mk::kernels::cuda {

/// Shared memory a block may ask for on sm_90.
inline constexpr std::size_t kSharedBytesMax = 227 * 1024;

/// Rows of one math warpgroup.
inline constexpr int kWarpgroupRows = 64;

/// A stage costs kBlockM + kBlockN rows of 128 bytes, a staging buffer 8 KiB per math warpgroup. 4
/// stages with 2 buffers are best where C stays here. 3 stages with 4 (a whole tile of 128 x 256)
/// let math go on at once when tiles leave slowly, all blocks at a time, over NVLink. `kSplitsOfK`:
/// the blocks of a cluster may share a tile's K (split_sums.cuh).
template <class ElementType, BLayout kLayoutOfB, int kTileM, int kTileN, int kStageCount,
          int kClusterRows, int kStaging = 2, bool kSplitsOfK = false>
struct GemmConfig {
  using Element = ElementType;  ///< __nv_bfloat16 or __half, of A, B and C
  static constexpr BLayout kBLayout = kLayoutOfB;
  static constexpr int kBlockM = kTileM;
  static constexpr int kBlockN = kTileN;
  static constexpr int kStages = kStageCount;
  /// Blocks of a cluster: they work on vertically adjacent tiles, each loads 1/kCluster of B's tile
  /// for all.
  static constexpr int kCluster = kClusterRows;
  static constexpr bool kSplitsK = kSplitsOfK;

  static constexpr int kMathWarpgroups = kBlockM / kWarpgroupRows;
  static constexpr int kThreads = 128 * (kMathWarpgroups + 1);
  static constexpr int kAccumulators = kBlockN / 2;  ///< fp32 registers of one thread
  static constexpr int kPieces = (kBlockN + kPieceColumns - 1) / kPieceColumns;
  /// Of one piece each, per math warpgroup; used in turn.
  static constexpr int kStagingBuffers = kStaging;

  /// Registers per thread by role: together no more than a block of 384 threads is given (3 x 168).
  static constexpr int kIoRegisters = 80;
  static constexpr int kMathRegisters = 208;

  /// Columns of B in a stage: as [K,N] it comes in boxes of 64 columns.
  static constexpr int kBColumns = kBLayout == BLayout::kNK ? kBlockN : (kBlockN + 63) / 64 * 64;
  static constexpr int kABytes = kBlockM * kBlockK * 2;
  static constexpr int kBBytes = kBColumns * kBlockK * 2;
  static constexpr int kPieceBytes = kWarpgroupRows * kPieceColumns * 2;

  /// Rows (or columns, for B as [K,N]) of the box of one TMA load of B.
  static constexpr int kBBox = kBLayout == BLayout::kNK ? kBlockN / kCluster : 64;

  static_assert(kMathWarpgroups == 2, "the register split is made for two");
  static_assert(kBlockN % 32 == 0 && kBlockN >= 64 && kBlockN <= 256);
  static_assert(kCluster == 1 || (kCluster == 2 && !kSplitsK));
};

/// First column of a piece among `columns`: the last piece begins earlier where they are no whole
/// pieces. So it has the second half of the piece before it, too. Both store the same there.
__device__ __forceinline__ constexpr int piece_column(int piece, int columns) {
  return piece * kPieceColumns <= columns - kPieceColumns ? piece * kPieceColumns
                                                          : columns - kPieceColumns;
}

/// For tiles that another's partial is added to (late_adds.cuh).
template <int kMath>
struct LateBarriers {
  std::uint64_t there;        ///< to the stores: the partial of the last such tile
  std::uint64_t taken;        ///< to the loads: all stores have seen that
  std::uint64_t full[kMath];  ///< to a store: it is in its staging

  /// One thread, before the block's first barrier.
  __device__ void begin() {
    ptx::mbarrier_init(&there, 1);
    ptx::mbarrier_init(&taken, kMath);
    for (auto& barrier : full) ptx::mbarrier_init(&barrier, 1);
  }
};

/// For blocks that share a tile's K (split_sums.cuh).
struct SplitBarriers {
  std::uint64_t room;  ///< to who sends: no block of the cluster needs its stages any more
  std::uint64_t come;  ///< to the warpgroup that sums: the others' sums are here
};

struct NoSplitBarriers {};

/// Shared memory of one block. The swizzle repeats every 1024 bytes, so every tile starts at a
/// multiple of that. A barrier's name says what has happened to its slot, and to whom it is news.
template <class Config, int kStoreWords, class GateData, class TileType, class OrderData>
struct alignas(1024) GemmShared {
  using Bytes = std::uint8_t;
  using Barrier = std::uint64_t;
  static constexpr int kStages = Config::kStages;
  static constexpr int kMath = Config::kMathWarpgroups;
  static constexpr int kBuffers = Config::kStagingBuffers;

  alignas(1024) Bytes a[kStages][Config::kABytes];
  alignas(1024) Bytes b[kStages][Config::kBBytes];
  alignas(1024) Bytes piece[kMath][kBuffers][Config::kPieceBytes];

  Barrier stage_full[kStages];           ///< to math: A and B of this stage have landed
  Barrier stage_empty[kStages];          ///< to the loads: no math warp of the cluster needs it now
  Barrier piece_full[kMath][kBuffers];   ///< to the stores: a piece of C is written
  Barrier piece_empty[kMath][kBuffers];  ///< to math: it has been read, and what passed it since

  LateBarriers<kMath> late;  ///< where partials are added
  /// Where the blocks of a cluster share K; else nothing.
  [[no_unique_address]] std::conditional_t<Config::kSplitsK, SplitBarriers, NoSplitBarriers> split;
  TileFeed<TileType> feed;  ///< where tiles are taken at run time

  alignas(16) std::uint32_t store_words[kStoreWords > 0 ? kStoreWords : 1];  ///< the output store's
  alignas(16) GateData gate;    ///< the readiness gate's
  alignas(16) OrderData order;  ///< the tile order's
};

/// CuTe's atom for so many columns. Those that CuTe has in a second, large header are in
/// wgmma_between.cuh, for the few units that need them.
template <int kColumns, class Element, cute::SM90::GMMA::Major kA, cute::SM90::GMMA::Major kB>
struct WgmmaAtom;
template <cute::SM90::GMMA::Major kA, cute::SM90::GMMA::Major kB>
struct WgmmaAtom<64, __nv_bfloat16, kA, kB> {
  using Type = cute::SM90::GMMA::MMA_64x64x16_F32BF16BF16_SS<kA, kB>;
};
template <cute::SM90::GMMA::Major kA, cute::SM90::GMMA::Major kB>
struct WgmmaAtom<64, __half, kA, kB> {
  using Type = cute::SM90::GMMA::MMA_64x64x16_F32F16F16_SS<kA, kB>;
};
template <cute::SM90::GMMA::Major kA, cute::SM90::GMMA::Major kB>
struct WgmmaAtom<128, __nv_bfloat16, kA, kB> {
  using Type = cute::SM90::GMMA::MMA_64x128x16_F32BF16BF16_SS<kA, kB>;
};
template <cute::SM90::GMMA::Major kA, cute::SM90::GMMA::Major kB>
struct WgmmaAtom<128, __half, kA, kB> {
  using Type = cute::SM90::GMMA::MMA_64x128x16_F32F16F16_SS<kA, kB>;
};
template <cute::SM90::GMMA::Major kA, cute::SM90::GMMA::Major kB>
struct WgmmaAtom<192, __nv_bfloat16, kA, kB> {
  using Type = cute::SM90::GMMA::MMA_64x192x16_F32BF16BF16_SS<kA, kB>;
};
template <cute::SM90::GMMA::Major kA, cute::SM90::GMMA::Major kB>
struct WgmmaAtom<192, __half, kA, kB> {
  using Type = cute::SM90::GMMA::MMA_64x192x16_F32F16F16_SS<kA, kB>;
};
template <cute::SM90::GMMA::Major kA, cute::SM90::GMMA::Major kB>
struct WgmmaAtom<256, __nv_bfloat16, kA, kB> {
  using Type = cute::SM90::GMMA::MMA_64x256x16_F32BF16BF16_SS<kA, kB>;
};
template <cute::SM90::GMMA::Major kA, cute::SM90::GMMA::Major kB>
struct WgmmaAtom<256, __half, kA, kB> {
  using Type = cute::SM90::GMMA::MMA_64x256x16_F32F16F16_SS<kA, kB>;
};

/// The wgmma instruction of a configuration: 64 x kBlockN x 16, both operands from shared memory.
template <class Config>
struct Wgmma {
  static constexpr auto kMajorB =
      Config::kBLayout == BLayout::kNK ? cute::SM90::GMMA::Major::K : cute::SM90::GMMA::Major::MN;
  static constexpr auto kMajorA = cute::SM90::GMMA::Major::K;
  using Atom =
      typename WgmmaAtom<Config::kBlockN, typename Config::Element, kMajorA, kMajorB>::Type;

  /// Issues acc (+)= A * B for 16 of K; `keep` false overwrites acc.
  static __device__ __forceinline__ void issue(std::uint64_t a, std::uint64_t b,
                                               float (&acc)[Config::kAccumulators], bool keep) {
    const auto scale = keep ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero;
    const auto all_of_acc = [&]<std::size_t... kIndex>(std::index_sequence<kIndex...>) {
      Atom::fma(a, b, acc[kIndex]..., scale);
    };
    all_of_acc(std::make_index_sequence<Config::kAccumulators>{});
  }

  /// A shared-memory matrix descriptor with the 128-byte swizzle. Strides in bytes: K-major
  /// operands repeat their 8-row atom every `stride`; N-major ones repeat their 64-column atom
  /// every `leading` and their 8-row atom every `stride`.
  static __device__ __forceinline__ std::uint64_t descriptor(std::uint32_t address,
                                                             std::uint32_t leading,
                                                             std::uint32_t stride) {
    cute::GmmaDescriptor descriptor;
    descriptor.bitfield.start_address_ = static_cast<std::uint16_t>(address >> 4);
    descriptor.bitfield.leading_byte_offset_ = static_cast<std::uint16_t>(leading >> 4);
    descriptor.bitfield.stride_byte_offset_ = static_cast<std::uint16_t>(stride >> 4);
    descriptor.bitfield.base_offset_ = 0;
    descriptor.bitfield.layout_type_ =
        static_cast<std::uint8_t>(cute::SM90::GMMA::LayoutType::B128);
    return descriptor.desc_;
  }
};

}  // namespace mk::kernels::cuda
