/// \file
/// Tensor maps: how the copy engine (TMA) is told about a matrix in global memory.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/comm/epilogue.h"
#include "kernels/cuda/core/gemm_types.h"
#include "shm/host/result.h"

namespace mk::kernels::cuda {

/// A map of the row-major matrix [rows, columns] of two-byte elements at `base`, rows `row_stride`
/// elements apart. It is moved in boxes of box_rows x box_columns with the 128-byte swizzle (so
/// box_columns is at most 64). Reads outside the matrix give zeros, writes outside are dropped.
/// `base` may be memory of a peer GPU. Fails with kInvalidArgument, `name` in the message, if base
/// or row stride is not a multiple of 16 bytes; kUnavailable without a CUDA driver.
Result<CUtensorMap> make_tensor_map(const char* name, DType dtype, const void* base,
                                    std::int64_t rows, std::int64_t columns,
                                    std::int64_t row_stride, int box_rows, int box_columns);

/// A map of planes, `plane_bytes` apart, of `tiles` packed tiles, each [rows, columns] row-major,
/// one after the other from a plane's beginning on, of elements or in fp32. They are stored in
/// boxes of 1 x 1 x 64 x 64 (fp32: 32) with the 128-byte swizzle. What of a box lies outside its
/// tile is not written. `columns` is a multiple of 8. Errors as above.
Result<CUtensorMap> make_tile_planes_map(const char* name, DType dtype, const void* base,
                                         std::int64_t planes, std::int64_t plane_bytes,
                                         std::int64_t tiles, std::int64_t rows,
                                         std::int64_t columns, Partials type = Partials::kElement);

/// A map of the row-major matrix at `base`, rows `row_stride` elements apart, as `tiles` rows of
/// tiles of `rows` rows each. They are stored in boxes of 1 x 1 x 64 x 64 (the first dimension is
/// always 0). What lies below a tile's rows is not written.
Result<CUtensorMap> make_row_tiles_map(const char* name, DType dtype, const void* base,
                                       std::int64_t tiles, std::int64_t rows, std::int64_t columns,
                                       std::int64_t row_stride);

/// A map of `slots` packed matrices [rows, columns], `slot_bytes` apart, moved in boxes of 1 x
/// box_rows x box_columns with the 128-byte swizzle.
Result<CUtensorMap> make_slots_map(const char* name, DType dtype, const void* base,
                                   std::int64_t slots, std::int64_t slot_bytes, std::int64_t rows,
                                   std::int64_t columns, int box_rows, int box_columns);

/// A map of the packed row-major matrix [rows, columns] as windows of `window` rows, moved in boxes
/// of 1 x window x box_columns with the 128-byte swizzle. Coordinates (column, s, e) with 0 < e <=
/// rows are a box whose first window - s rows are the rows from e - (window - s) on, and whose
/// others lie outside. So a box ends with any row: what is outside is read as zeros and not
/// written.
Result<CUtensorMap> make_row_window_map(const char* name, DType dtype, const void* base,
                                        std::int64_t rows, std::int64_t columns, int window,
                                        int box_columns);

/// A map of the packed weights [experts, n, k] (kNK) or [experts, k, n] (kKN) as [.., halves, ..].
/// Coordinates are (k, column of a half, half, expert), moved in boxes of 64 x (box_n / halves) x
/// halves x 1. For kKN they are (column of a half, half, k, expert), in boxes of 64 x 1 x 64 x 1.
/// It has the 128-byte swizzle. Each dimension ends by itself, so that nothing of another half or
/// expert is read. n is a multiple of `halves`.
Result<CUtensorMap> make_expert_weights_map(const char* name, DType dtype, BLayout layout,
                                            const void* base, std::int64_t experts, std::int64_t n,
                                            std::int64_t k, int halves, int box_n);

/// A tensor [batch, rows, heads, head_dim] with any strides (in elements) but the last one, which
/// is 1. head_dim is a multiple of 64.
struct HeadsTensor {
  std::int64_t batch = 1;
  std::int64_t rows = 0;
  std::int64_t heads = 1;
  std::int64_t head_dim = 0;
  std::int64_t batch_stride = 0;
  std::int64_t row_stride = 0;
  std::int64_t head_stride = 0;
};

/// A map of such a tensor as [batch, head, column of 64, row, 64], loaded in boxes of `box_rows`
/// rows of one head, all columns, with the 128-byte swizzle. Columns lie one after the other. Reads
/// outside the rows give zeros. Errors as above.
Result<CUtensorMap> make_heads_map(const char* name, DType dtype, const void* base,
                                   const HeadsTensor& tensor, int box_rows);

/// A map of such a tensor as [batch, head, row, head_dim], loaded in boxes of `box_rows` rows of
/// one head, which then lie one after the other, not swizzled. Reads outside the rows give zeros.
/// Errors as above.
Result<CUtensorMap> make_head_rows_map(const char* name, DType dtype, const void* base,
                                       const HeadsTensor& tensor, int box_rows);

}  // namespace mk::kernels::cuda
