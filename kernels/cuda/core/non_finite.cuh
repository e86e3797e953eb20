/// \file
/// Inf and NaN in rows of V that a mask hides from some of a tile's rows.
///
/// Their weight there is zero, but zero times Inf is NaN. So three warps that have nothing else to
/// do look through the tiles of V that are masked, before the math warpgroups may use them. They
/// put zero in the place of what is not finite, and note in a table from which row on it is seen.
/// The rows that see it get it added at their item's end. All other tiles, and the keys of a masked
/// tile that all rows see, pass by unseen: a weight times Inf there is what the sum demands.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/core/attention_config.cuh"
#include "kernels/cuda/core/block_sync.cuh"
#include "kernels/cuda/core/ptx.cuh"

namespace mk::kernels::cuda {

/// A masked tile of V, as the loading thread tells the inspecting warps of it.
struct MaskedTile {
  int stage;           ///< where it lands; negative: there are no more
  int keys;            ///< keys from here on are no keys of the range
  int shift;           ///< key j is seen from the item's row j + shift on
  std::uint32_t item;  ///< how many items with keys came before
};

/// What of one warpgroup's rows is not finite, for each column of V: the first row that sees such a
/// value, kNobody if none does.
template <int kHeadDim>
struct NonFiniteTable {
  static constexpr int kNobody = 1 << 20;
  enum Kind { kPlus, kMinus, kNaN, kKinds };
  int first_row[kKinds][kHeadDim];
  int used;  ///< whether anything is in it

  __device__ __forceinline__ void clear(int thread, int threads) {
    for (int i = thread; i < kKinds * kHeadDim; i += threads) first_row[0][i] = kNobody;
    if (thread == 0) used = 0;
  }
  __device__ void note(Kind kind, int column, int row) {
    atomicMin(&first_row[kind][column], row < 0 ? 0 : row);
    *static_cast<volatile int*>(&used) = 1;
  }
  /// What is to be added to a row's element.
  __device__ float of(int column, int row) const {
    return (row >= first_row[kPlus][column] ? INFINITY : 0.0f) +
           (row >= first_row[kMinus][column] ? -INFINITY : 0.0f) +
           (row >= first_row[kNaN][column] ? NAN : 0.0f);
  }
};

template <class Config>
class NonFiniteSearch {
 public:
  static constexpr int kWarps = 3;
  using Table = NonFiniteTable<Config::kHeadDim>;

  /// Looks through one tile, as one of 32 kWarps threads. `cleared`: warps of the math
  /// warpgroup that are done with their table, of all items so far.
  static __device__ __forceinline__ void inspect(const MaskedTile& tile, std::uint8_t* v,
                                                 Table (&tables)[Config::kMathWarpgroups],
                                                 const std::uint32_t* cleared, int thread) {
    constexpr int kRunsOfKey = 8;
    constexpr int kRuns = Config::kTileKeys * kRunsOfKey;  // of a column of 64 elements
    constexpr int kTogether = 2;
    constexpr int kStep = kWarps * 32;
    auto* runs = reinterpret_cast<uint4*>(v);
    const int begin = first_hidden(tile) * kRunsOfKey;
#pragma unroll 1
    for (int column = 0; column < Config::kColumns * kRuns; column += kRuns) {
#pragma unroll 1
      for (int first = begin + thread; first < kRuns; first += kStep * kTogether) {
        uint4 run[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const int index = first + i * kStep;
          run[i] = index < kRuns ? runs[column + index] : uint4{};
        }
        std::uint32_t found = 0;
#pragma unroll
        for (int i = 0; i < kTogether; ++i) found |= has_non_finite(run[i]) ? 1u << i : 0u;
#pragma unroll 1
        for (int i = 0; found >> i != 0; ++i) {
          if (found >> i & 1) clean(column + first + i * kStep, tile, v, tables, cleared);
        }
      }
    }
    ptx::fence_shared_to_async();
    __syncwarp();
  }

  /// The first key that a row of the item does not see.
  static __device__ __forceinline__ int first_hidden(const MaskedTile& tile) {
    return max(0, min(1 - tile.shift, tile.keys));
  }

 private:
  static constexpr bool kBf16 = std::is_same_v<typename Config::Element, __nv_bfloat16>;
  static constexpr std::uint32_t kExponent = kBf16 ? 0x7f80 : 0x7c00;

  static __device__ __forceinline__ bool has_non_finite(const uint4& run) {
    constexpr std::uint32_t kMagnitude = 0x7fff7fff;
    const std::uint32_t largest = __vmaxu2(__vmaxu2(run.x & kMagnitude, run.y & kMagnitude),
                                           __vmaxu2(run.z & kMagnitude, run.w & kMagnitude));
    return largest >= kExponent << 16 || (largest & 0xffff) >= kExponent;
  }

  static __device__ __forceinline__ void clean(int index, const MaskedTile& tile, std::uint8_t* v,
                                               Table (&tables)[Config::kMathWarpgroups],
                                               const std::uint32_t* cleared) {
#pragma unroll 1
    for (int w = 0; w < Config::kMathWarpgroups; ++w) {
      wait_lean_until([&] { return ptx::count_acquire_shared(&cleared[w]) >= 4 * tile.item; });
    }
    const int key = index / 8 % Config::kTileKeys;
    const int column = index / (8 * Config::kTileKeys) * 64 + ((index % 8) ^ (key % 8)) * 8;
    auto* elements = reinterpret_cast<std::uint16_t*>(v) + index * 8;
#pragma unroll 1
    for (int i = 0; i < 8; ++i) {
      const std::uint32_t bits = elements[i];
      if ((bits & kExponent) != kExponent) continue;
      elements[i] = 0;
      if (key >= tile.keys) continue;
      const bool is_nan = (bits & 0x7fff) != kExponent;
      const auto kind = is_nan ? Table::kNaN : bits >> 15 ? Table::kMinus : Table::kPlus;
#pragma unroll 1
      for (int w = 0; w < Config::kMathWarpgroups; ++w) {
        const int row = key + tile.shift - w * kAttentionRows;
        if (row >= kAttentionRows) continue;
        tables[w].note(kind, column + i, row);
      }
    }
  }
};

}  // namespace mk::kernels::cuda
