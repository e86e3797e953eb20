/// \file
/// Tiles of a matrix product on one core, with fp32 sums: by oneDNN, or in one order of K. The only
/// file that knows oneDNN is cpu_gemm.cc.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "kernels/comm/types.h"
#include "shm/host/result.h"

namespace mk::kernels {

/// How the product is computed.
enum class GemmPath : std::uint8_t {
  kAuto = 0,        ///< kNative where oneDNN has an optimised kernel for the type and machine, else
                    ///< kThroughF32
  kNative = 1,      ///< 16-bit elements straight into oneDNN (bf16 on avx512_core and later)
  kThroughF32 = 2,  ///< panels widened to fp32 first; runs everywhere
  kOrdered = 3,  ///< without oneDNN: an element's bits depend on its row and column alone, not on
                 ///< the tile (ordered_gemm.h); runs everywhere
};

class CpuGemm {
 public:
  /// Rows and columns of a tile.
  struct TileShape {
    std::uint32_t rows = 0;
    std::uint32_t columns = 0;
    friend constexpr bool operator==(const TileShape&, const TileShape&) = default;
  };

  /// For `blocks` threads that multiply tiles of at most `largest`. kUnsupported: oneDNN cannot do
  /// it here.
  static Result<std::unique_ptr<CpuGemm>> create(std::uint32_t blocks, TileShape largest,
                                                 std::uint32_t k, DType dtype, BLayout b_layout,
                                                 GemmPath path = GemmPath::kAuto);
  ~CpuGemm();
  CpuGemm(const CpuGemm&) = delete;
  CpuGemm& operator=(const CpuGemm&) = delete;

  /// Makes what tiles of these shapes need, with A's rows any of `ldas` elements apart and B's
  /// `ldb`; cheap when it was made before. While no block multiplies.
  Status prepare(std::span<const TileShape> shapes, std::span<const std::uint64_t> ldas,
                 std::uint64_t ldb);

  /// target[rows][columns], packed, = A[rows][k] B[k][columns]. `a` points to the tile's first row,
  /// `b` to its first column (BLayout::kNK: its first row). The shape, `lda` and B's leading
  /// dimension are of the last `prepare`. Each block calls it on one thread; false if oneDNN
  /// failed: see `error`.
  bool multiply(std::uint32_t block, TileShape shape, const std::uint16_t* a, std::uint64_t lda,
                const std::uint16_t* b, float* target);

  /// The first failure of `multiply`.
  Status error() const;

  /// Never kAuto.
  GemmPath path() const;

 private:
  class Impl;
  explicit CpuGemm(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

constexpr const char* name_of(GemmPath path) {
  return path == GemmPath::kNative       ? "native"
         : path == GemmPath::kThroughF32 ? "through-f32"
         : path == GemmPath::kOrdered    ? "ordered"
                                         : "auto";
}

}  // namespace mk::kernels
