/// \file
/// Tiles of a product, rounded to the element type and stored where they belong: CpuGemm with a
/// scratch tile for each block.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/comm/sum_job.h"
#include "kernels/comm/tile_grid.h"
#include "kernels/cpu/cpu_gemm.h"
#include "kernels/cpu/row_math.h"

namespace mk::kernels {

/// Where a tile goes, and as what.
struct TileOutput {
  void* target = nullptr;
  std::uint64_t stride = 0;  ///< from row to row, in elements of `type`
  Partials type = Partials::kElement;
  Activation activation = Activation::kNone;  ///< of the result
  const std::uint16_t* bias = nullptr;        ///< of all of B's columns; or null
  std::uint32_t rows_kept = kTileSideMax;     ///< the first ones; others are not stored
};

class TileGemm {
 public:
  /// For `blocks` threads and tiles of at most `largest`. B has `n` columns. `ordered`: an
  /// element's bits depend on its row and column alone (GemmPath::kOrdered).
  static Result<std::unique_ptr<TileGemm>> create(std::uint32_t blocks, CpuGemm::TileShape largest,
                                                  std::uint32_t n, std::uint32_t k, DType dtype,
                                                  BLayout b_layout, bool ordered = false);

  /// Makes what the tiles of these grids need, with A's rows any of `ldas` elements apart and B's
  /// `ldb`. While no block multiplies. kInvalidArgument: a leading dimension is too small.
  Status prepare(std::span<const TileGrid> grids, std::span<const std::uint64_t> ldas,
                 std::uint64_t ldb);

  /// A B, for the columns of `b` from `column` on; `a`: the tile's first row. Strides in elements.
  /// The shape and leading dimensions are of the last `prepare`. Each block on one thread; false if
  /// oneDNN failed: see `error`.
  bool multiply(std::uint32_t block, CpuGemm::TileShape shape, const std::uint16_t* a,
                std::uint64_t lda, const std::uint16_t* b, std::uint32_t column,
                const TileOutput& output);

  /// The same, neither rounded nor stored: [rows][columns] of fp32, the block's own until its next
  /// product. Null if oneDNN failed.
  float* product(std::uint32_t block, CpuGemm::TileShape shape, const std::uint16_t* a,
                 std::uint64_t lda, const std::uint16_t* b, std::uint32_t column);

  /// Makes what tiles of one expert's rows need: of `row_pad`, 2 `row_pad`, ... `tile_m` rows and
  /// of these widths, A's and B's rows dense.
  Status prepare_row_tiles(std::uint32_t tile_m, std::uint32_t row_pad,
                           std::span<const std::uint32_t> widths);

  Status error() const { return gemm_->error(); }
  /// Never kAuto.
  GemmPath path() const { return gemm_->path(); }

 private:
  TileGemm() = default;

  std::unique_ptr<CpuGemm> gemm_;
  const RowMath* math_ = nullptr;
  BLayout b_layout_ = BLayout::kKN;
  std::uint32_t n_ = 0;
  std::uint32_t k_ = 0;
  std::uint64_t ldb_ = 0;
  std::vector<std::vector<float>> scratch_;  ///< by block
};

}  // namespace mk::kernels
