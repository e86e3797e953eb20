/// \file
/// What the attention core is compiled for: element type, head dimension, tile, stages; and what
/// follows from it (threads, registers, the wgmma instructions).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>
#include <cute/arch/mma_sm90_desc.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/arch/mma_sm90_gmma_ext.hpp>
#include <type_traits>
#include <utility>

namespace mk::kernels::cuda {

/// Rows of one math warpgroup's tile of queries.
inline constexpr int kAttentionRows = 64;

/// A stage costs 4 * kTileKeys * kHeadDim bytes (K and V), the queries 2 * kTileQueries * kHeadDim.
template <class ElementType, int kDim, int kQueries, int kKeys, int kStageCount>
struct AttentionConfig {
  using Element = ElementType;  ///< __nv_bfloat16 or __half, of Q, K, V and O
  static constexpr int kHeadDim = kDim;
  static constexpr int kTileQueries = kQueries;
  static constexpr int kTileKeys = kKeys;
  static constexpr int kStages = kStageCount;  ///< of K, and as many of V

  static constexpr int kMathWarpgroups = kTileQueries / kAttentionRows;
  static constexpr int kThreads = 128 * (kMathWarpgroups + 1);
  /// fp32 registers of one thread: scores of a tile, and its part of O.
  static constexpr int kScores = kTileKeys / 2;
  static constexpr int kOutputs = kHeadDim / 2;
  /// So many of the scores are weighed beside the product of the tile before. The others are
  /// when that is complete: while the exponentials of these are on their way, there is time to
  /// round weights and to scale O. With heads of 64 the product is shorter, and hides fewer.
  static constexpr int kWeightsBeside = kScores * (kHeadDim == 64 ? 30 : 60) / 100 / 4 * 4;

  /// Registers per thread by role: together no more than the block is given at its start (3 x 168
  /// or 4 x 128).
  static constexpr int kLoadRegisters = kMathWarpgroups == 2 ? 24 : 32;
  static constexpr int kMathRegisters = kMathWarpgroups == 2 ? 240 : 160;

  /// A tensor's tile lies in shared memory as columns of 64 elements: rows of 128 bytes, swizzled.
  static constexpr int kColumns = kHeadDim / 64;
  static constexpr int kQueryBytes = kAttentionRows * kHeadDim * 2;  ///< of one warpgroup
  static constexpr int kKeyBytes = kTileKeys * kHeadDim * 2;         ///< of K or of V

  static_assert(kMathWarpgroups == 2 || kMathWarpgroups == 3);
  static_assert(kHeadDim == 64 || kHeadDim == 128);
  static_assert(kTileKeys % 16 == 0 && kTileKeys <= 256);
};

/// The two products of a tile, as wgmma instructions of 64 rows and 16 of the summed dimension.
template <class Config>
struct AttentionProducts {
  static constexpr bool kBf16 = std::is_same_v<typename Config::Element, __nv_bfloat16>;
  static constexpr int kTileKeys = Config::kTileKeys;
  using Major = cute::SM90::GMMA::Major;
  using ScaleOut = cute::SM90::GMMA::ScaleOut;

#define MK_SCORES_ATOM(n)                                                                         \
  std::conditional_t<kBf16, cute::SM90::GMMA::MMA_64x##n##x16_F32BF16BF16_SS<Major::K, Major::K>, \
                     cute::SM90::GMMA::MMA_64x##n##x16_F32F16F16_SS<Major::K, Major::K>>
  static auto select_scores() {
    if constexpr (kTileKeys == 64) {
      return MK_SCORES_ATOM(64){};
    } else if constexpr (kTileKeys == 96) {
      return MK_SCORES_ATOM(96){};
    } else if constexpr (kTileKeys == 112) {
      return MK_SCORES_ATOM(112){};
    } else if constexpr (kTileKeys == 128) {
      return MK_SCORES_ATOM(128){};
    } else if constexpr (kTileKeys == 144) {
      return MK_SCORES_ATOM(144){};
    } else if constexpr (kTileKeys == 160) {
      return MK_SCORES_ATOM(160){};
    } else if constexpr (kTileKeys == 176) {
      return MK_SCORES_ATOM(176){};
    } else if constexpr (kTileKeys == 192) {
      return MK_SCORES_ATOM(192){};
    } else if constexpr (kTileKeys == 224) {
      return MK_SCORES_ATOM(224){};
    } else {
      static_assert(kTileKeys == 256);
      return MK_SCORES_ATOM(256){};
    }
  }
#undef MK_SCORES_ATOM
  static auto select_output() {
    namespace gmma = cute::SM90::GMMA;
    if constexpr (Config::kHeadDim == 128) {
      return std::conditional_t<kBf16, gmma::MMA_64x128x16_F32BF16BF16_RS<Major::K, Major::MN>,
                                gmma::MMA_64x128x16_F32F16F16_RS<Major::K, Major::MN>>{};
    } else {
      return std::conditional_t<kBf16, gmma::MMA_64x64x16_F32BF16BF16_RS<Major::K, Major::MN>,
                                gmma::MMA_64x64x16_F32F16F16_RS<Major::K, Major::MN>>{};
    }
  }
  using ScoresAtom = decltype(select_scores());
  using OutputAtom = decltype(select_output());

  /// Issues S = Q K^T, of tiles at these shared-memory addresses.
  static __device__ __forceinline__ void scores(std::uint32_t q, std::uint32_t k,
                                                float (&s)[Config::kScores]) {
#pragma unroll
    for (int step = 0; step < Config::kHeadDim / 16; ++step) {
      const int column = step / 4;
      const int within = step % 4 * (16 * 2);
      issue_scores(descriptor<0>(q, column * (kAttentionRows * 128) + within),
                   descriptor<0>(k, column * (kTileKeys * 128) + within), s, step > 0,
                   std::make_index_sequence<Config::kScores>{});
    }
  }

  /// Issues O += P V. P is in registers, two weights in each.
  static __device__ __forceinline__ void output(const std::uint32_t (&p)[Config::kScores / 2],
                                                std::uint32_t v, float (&o)[Config::kOutputs]) {
#pragma unroll
    for (int step = 0; step < kTileKeys / 16; ++step) {
      issue_output(p + step * 4, descriptor<kTileKeys * 128>(v, step * (16 * 128)), o,
                   std::make_index_sequence<Config::kOutputs>{});
    }
  }

  /// A matrix descriptor with the 128-byte swizzle; bytes. Rows of the summed dimension (Q, K)
  /// repeat their 8-row atom every 1024. V, whose columns are the product's, repeats its 64-column
  /// atom every kLeading as well.
  template <int kLeading>
  static __device__ __forceinline__ std::uint64_t descriptor(std::uint32_t tile, int offset) {
    cute::GmmaDescriptor descriptor;
    descriptor.bitfield.stride_byte_offset_ = static_cast<std::uint16_t>(8 * 128 >> 4);
    descriptor.bitfield.base_offset_ = 0;
    descriptor.bitfield.layout_type_ =
        static_cast<std::uint8_t>(cute::SM90::GMMA::LayoutType::B128);
    // Address and leading offset, 16 bits each; the address stays below 2^14.
    descriptor.reg32_[0] = (tile >> 4) + (offset >> 4) + (kLeading >> 4 << 16);
    return descriptor.desc_;
  }

 private:
  template <std::size_t... kIndex>
  static __device__ __forceinline__ void issue_scores(std::uint64_t q, std::uint64_t k, float* s,
                                                      bool keep, std::index_sequence<kIndex...>) {
    ScoresAtom::fma(q, k, s[kIndex]..., keep ? ScaleOut::One : ScaleOut::Zero);
  }
  template <std::size_t... kIndex>
  static __device__ __forceinline__ void issue_output(const std::uint32_t* p, std::uint64_t v,
                                                      float* o, std::index_sequence<kIndex...>) {
    OutputAtom::fma(p[0], p[1], p[2], p[3], v, o[kIndex]..., ScaleOut::One);
  }
};

}  // namespace mk::kernels::cuda
