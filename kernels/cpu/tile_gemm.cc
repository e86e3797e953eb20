#include "kernels/cpu/tile_gemm.h"

#include <algorithm>

#include "kernels/cpu/finish_row.h"

namespace mk::kernels {

Result<std::unique_ptr<TileGemm>> TileGemm::create(std::uint32_t blocks, CpuGemm::TileShape largest,
                                                   std::uint32_t n, std::uint32_t k, DType dtype,
                                                   BLayout b_layout, bool ordered) {
  if (k < 1 || k > 1u << 24)
    return fail(ErrorCode::kInvalidArgument, "k = {} is not in 1 to {}", k, 1u << 24);
  std::unique_ptr<TileGemm> tiles(new TileGemm);
  largest.columns = std::min(largest.columns, n);
  MK_ASSIGN_OR_RETURN(tiles->gemm_,
                      CpuGemm::create(blocks, largest, k, dtype, b_layout,
                                      ordered ? GemmPath::kOrdered : GemmPath::kAuto));
  tiles->math_ = &row_math(dtype);
  tiles->b_layout_ = b_layout;
  tiles->n_ = n;
  tiles->k_ = k;
  tiles->scratch_.resize(blocks);
  for (auto& tile : tiles->scratch_) tile.resize(std::size_t{largest.rows} * largest.columns);
  return tiles;
}

Status TileGemm::prepare(std::span<const TileGrid> grids, std::span<const std::uint64_t> ldas,
                         std::uint64_t ldb) {
  const std::uint32_t b_side = b_layout_ == BLayout::kKN ? n_ : k_;
  const std::uint64_t lda = *std::min_element(ldas.begin(), ldas.end());
  if (ldb < b_side || lda < k_) {
    return fail(ErrorCode::kInvalidArgument,
                "leading dimensions a {}, b {} are too small; at least {}, {}", lda, ldb, k_,
                b_side);
  }
  ldb_ = ldb;
  // Interior tiles, the last column of tiles, the last row, and the corner.
  std::vector<CpuGemm::TileShape> shapes;
  for (const TileGrid& grid : grids) {
    if (grid.tiles() == 0) continue;
    const std::uint32_t last_rows = (grid.rows() - 1) % grid.tile_rows() + 1;
    const std::uint32_t last_cols = (grid.columns() - 1) % grid.tile_cols() + 1;
    for (std::uint32_t rows : {grid.tile_rows(), last_rows}) {
      for (std::uint32_t columns : {grid.tile_cols(), last_cols}) {
        const CpuGemm::TileShape shape{rows, columns};
        if (columns <= grid.columns() &&
            std::find(shapes.begin(), shapes.end(), shape) == shapes.end())
          shapes.push_back(shape);
      }
    }
  }
  return gemm_->prepare(shapes, ldas, ldb);
}

Status TileGemm::prepare_row_tiles(std::uint32_t tile_m, std::uint32_t row_pad,
                                   std::span<const std::uint32_t> widths) {
  std::vector<CpuGemm::TileShape> shapes;
  for (std::uint32_t rows = row_pad; rows <= tile_m; rows += row_pad) {
    for (const std::uint32_t width : widths) {
      const CpuGemm::TileShape shape{rows, width};
      if (std::find(shapes.begin(), shapes.end(), shape) == shapes.end()) shapes.push_back(shape);
    }
  }
  const std::uint64_t lda = k_;
  ldb_ = b_layout_ == BLayout::kKN ? n_ : k_;
  return gemm_->prepare(shapes, {&lda, 1}, ldb_);
}

float* TileGemm::product(std::uint32_t block, CpuGemm::TileShape shape, const std::uint16_t* a,
                         std::uint64_t lda, const std::uint16_t* b, std::uint32_t column) {
  const std::uint16_t* first = b + (b_layout_ == BLayout::kKN ? column : column * ldb_);
  float* const tile = scratch_[block].data();
  return gemm_->multiply(block, shape, a, lda, first, tile) ? tile : nullptr;
}

bool TileGemm::multiply(std::uint32_t block, CpuGemm::TileShape shape, const std::uint16_t* a,
                        std::uint64_t lda, const std::uint16_t* b, std::uint32_t column,
                        const TileOutput& output) {
  float* sums = product(block, shape, a, lda, b, column);
  if (sums == nullptr) return false;
  const RowFinish finish{output.type, output.activation,
                         output.bias == nullptr ? nullptr : output.bias + column};
  auto* row = static_cast<std::byte*>(output.target);
  for (std::uint32_t i = 0; i < std::min(shape.rows, output.rows_kept); ++i) {
    finish_row(*math_, finish, sums, row, shape.columns);
    sums += shape.columns;
    row += output.stride * bytes_of(output.type);
  }
  return true;
}

}  // namespace mk::kernels
