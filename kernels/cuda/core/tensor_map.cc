#include "kernels/cuda/core/tensor_map.h"

#include <cuda_runtime_api.h>

namespace mk::kernels::cuda {
namespace {

constexpr std::int64_t kElementBytes = 2;
constexpr std::int64_t kAlignBytes = 16;

/// The driver's encoder, looked up at run time so that nothing links libcuda.
decltype(&cuTensorMapEncodeTiled) encoder() {
  static const auto function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult query = cudaDriverEntryPointSymbolNotFound;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault,
                                         &query) != cudaSuccess ||
        query != cudaDriverEntryPointSuccess) {
      found = nullptr;
    }
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  }();
  return function;
}

/// Sizes and boxes from the fastest dimension (columns) on; strides of the others, in bytes.
template <int kRank>
Result<CUtensorMap> encode_as(const char* name, CUtensorMapDataType type, const void* base,
                              const cuuint64_t (&sizes)[kRank],
                              const cuuint64_t (&strides)[kRank - 1],
                              const cuuint32_t (&box)[kRank],
                              CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B) {
  if (reinterpret_cast<std::uintptr_t>(base) % kAlignBytes != 0 || base == nullptr) {
    return fail(ErrorCode::kInvalidArgument,
                "matrix {}: its address {} must be a multiple of {} bytes", name, fmt::ptr(base),
                kAlignBytes);
  }
  for (const cuuint64_t stride : strides) {
    if (stride % kAlignBytes == 0) continue;
    return fail(ErrorCode::kInvalidArgument,
                "matrix {}: its rows are {} elements apart; the copy engine needs a multiple of "
                "{}: pad them",
                name, stride / kElementBytes, kAlignBytes / kElementBytes);
  }
  const auto encode_tiled = encoder();
  if (encode_tiled == nullptr) {
    return fail(ErrorCode::kUnavailable,
                "no CUDA driver with tensor maps (12.0 or later) on this machine");
  }
  cuuint32_t element_strides[kRank];
  for (cuuint32_t& stride : element_strides) stride = 1;
  CUtensorMap map{};
  const CUresult result =
      encode_tiled(&map, type, kRank, const_cast<void*>(base), sizes, strides, box, element_strides,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return fail(ErrorCode::kInvalidArgument,
                "matrix {}: the driver refuses a map of [.., {}, {}], box {} x {} (CUresult {})",
                name, sizes[1], sizes[0], box[1], box[0], static_cast<int>(result));
  }
  return map;
}

/// The same of elements.
template <int kRank>
Result<CUtensorMap> encode(const char* name, DType dtype, const void* base,
                           const cuuint64_t (&sizes)[kRank], const cuuint64_t (&strides)[kRank - 1],
                           const cuuint32_t (&box)[kRank],
                           CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B) {
  return encode_as<kRank>(
      name,
      dtype == DType::kBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
      base, sizes, strides, box, swizzle);
}

cuuint64_t u64(std::int64_t value) { return static_cast<cuuint64_t>(value); }
cuuint32_t u32(int value) { return static_cast<cuuint32_t>(value); }

}  // namespace

Result<CUtensorMap> make_tensor_map(const char* name, DType dtype, const void* base,
                                    std::int64_t rows, std::int64_t columns,
                                    std::int64_t row_stride, int box_rows, int box_columns) {
  if (rows <= 0 || columns <= 0 || row_stride < columns) {
    return fail(ErrorCode::kInvalidArgument,
                "matrix {}: [{}, {}] with rows {} elements apart is no matrix", name, rows, columns,
                row_stride);
  }
  return encode<2>(name, dtype, base, {u64(columns), u64(rows)}, {u64(row_stride * kElementBytes)},
                   {u32(box_columns), u32(box_rows)});
}

Result<CUtensorMap> make_tile_planes_map(const char* name, DType dtype, const void* base,
                                         std::int64_t planes, std::int64_t plane_bytes,
                                         std::int64_t tiles, std::int64_t rows,
                                         std::int64_t columns, Partials type) {
  const std::int64_t row_bytes = columns * bytes_of(type);
  const cuuint64_t sizes[] = {u64(columns), u64(rows), u64(tiles), u64(planes)};
  const cuuint64_t strides[] = {u64(row_bytes), u64(rows * row_bytes), u64(plane_bytes)};
  const cuuint32_t box[] = {128 / bytes_of(type), 64, 1, 1};
  if (type == Partials::kElement) return encode<4>(name, dtype, base, sizes, strides, box);
  return encode_as<4>(name, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, base, sizes, strides, box);
}

Result<CUtensorMap> make_row_tiles_map(const char* name, DType dtype, const void* base,
                                       std::int64_t tiles, std::int64_t rows, std::int64_t columns,
                                       std::int64_t row_stride) {
  const std::int64_t tile_bytes = rows * row_stride * kElementBytes;
  return encode<4>(name, dtype, base, {u64(columns), u64(rows), u64(tiles), 1},
                   {u64(row_stride * kElementBytes), u64(tile_bytes), u64(tile_bytes)},
                   {64, 64, 1, 1});
}

Result<CUtensorMap> make_slots_map(const char* name, DType dtype, const void* base,
                                   std::int64_t slots, std::int64_t slot_bytes, std::int64_t rows,
                                   std::int64_t columns, int box_rows, int box_columns) {
  return encode<3>(name, dtype, base, {u64(columns), u64(rows), u64(slots)},
                   {u64(columns * kElementBytes), u64(slot_bytes)},
                   {u32(box_columns), u32(box_rows), 1});
}

Result<CUtensorMap> make_row_window_map(const char* name, DType dtype, const void* base,
                                        std::int64_t rows, std::int64_t columns, int window,
                                        int box_columns) {
  const std::int64_t row_bytes = columns * kElementBytes;
  // Window e begins `window` rows before row e; e is 1 at least. The rows before the matrix are
  // outside of every box that a caller asks for.
  const auto* const before = reinterpret_cast<const void*>(
      reinterpret_cast<std::uintptr_t>(base) - static_cast<std::uintptr_t>(window * row_bytes));
  if (base == nullptr) return encode<2>(name, dtype, base, {1, 1}, {16}, {1, 1});
  return encode<3>(name, dtype, before, {u64(columns), u64(window), u64(rows + 1)},
                   {u64(row_bytes), u64(row_bytes)}, {u32(box_columns), u32(window), 1});
}

Result<CUtensorMap> make_expert_weights_map(const char* name, DType dtype, BLayout layout,
                                            const void* base, std::int64_t experts, std::int64_t n,
                                            std::int64_t k, int halves, int box_n) {
  const std::int64_t half = n / halves;
  const cuuint64_t expert_bytes = u64(n * k * kElementBytes);
  if (layout == BLayout::kNK) {
    return encode<4>(name, dtype, base, {u64(k), u64(half), u64(halves), u64(experts)},
                     {u64(k * kElementBytes), u64(half * k * kElementBytes), expert_bytes},
                     {64, u32(box_n / halves), u32(halves), 1});
  }
  return encode<4>(name, dtype, base, {u64(half), u64(halves), u64(k), u64(experts)},
                   {u64(half * kElementBytes), u64(n * kElementBytes), expert_bytes},
                   {64, 1, 64, 1});
}

namespace {

/// Where there is only one, its stride means nothing, but the driver looks at it.
cuuint64_t stride(std::int64_t count, std::int64_t elements) {
  return u64((count > 1 ? elements : 64) * kElementBytes);
}

}  // namespace

Result<CUtensorMap> make_heads_map(const char* name, DType dtype, const void* base,
                                   const HeadsTensor& tensor, int box_rows) {
  const std::int64_t columns = tensor.head_dim / 64;
  return encode<5>(
      name, dtype, base, {64, u64(tensor.rows), u64(columns), u64(tensor.heads), u64(tensor.batch)},
      {stride(tensor.rows, tensor.row_stride), 64 * kElementBytes,
       stride(tensor.heads, tensor.head_stride), stride(tensor.batch, tensor.batch_stride)},
      {64, u32(box_rows), u32(static_cast<int>(columns)), 1, 1});
}

Result<CUtensorMap> make_head_rows_map(const char* name, DType dtype, const void* base,
                                       const HeadsTensor& tensor, int box_rows) {
  return encode<4>(
      name, dtype, base,
      {u64(tensor.head_dim), u64(tensor.rows), u64(tensor.heads), u64(tensor.batch)},
      {stride(tensor.rows, tensor.row_stride), stride(tensor.heads, tensor.head_stride),
       stride(tensor.batch, tensor.batch_stride)},
      {u32(static_cast<int>(tensor.head_dim)), u32(box_rows), 1, 1}, CU_TENSOR_MAP_SWIZZLE_NONE);
}

}  // namespace mk::kernels::cuda
