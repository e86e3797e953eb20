#include "kernels/cuda/tensor_map.h"

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

}  // namespace

Result<CUtensorMap> make_tensor_map(const char* name, DType dtype, const void* base,
                                    std::int64_t rows, std::int64_t columns,
                                    std::int64_t row_stride, int box_rows, int box_columns) {
  if (rows <= 0 || columns <= 0 || row_stride < columns) {
    return fail(ErrorCode::kInvalidArgument,
                "matrix {}: [{}, {}] with rows {} elements apart is no matrix", name, rows, columns,
                row_stride);
  }
  if (reinterpret_cast<std::uintptr_t>(base) % kAlignBytes != 0 || base == nullptr) {
    return fail(ErrorCode::kInvalidArgument,
                "matrix {}: its address {} must be a multiple of {} bytes", name, fmt::ptr(base),
                kAlignBytes);
  }
  if (row_stride * kElementBytes % kAlignBytes != 0) {
    return fail(ErrorCode::kInvalidArgument,
                "matrix {}: its rows are {} elements apart; the copy engine needs a multiple of "
                "{}: pad them",
                name, row_stride, kAlignBytes / kElementBytes);
  }
  const auto encode = encoder();
  if (encode == nullptr) {
    return fail(ErrorCode::kUnavailable,
                "no CUDA driver with tensor maps (12.0 or later) on this machine");
  }
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(row_stride * kElementBytes)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(box_columns),
                             static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t element_strides[2] = {1, 1};
  CUtensorMap map{};
  const CUresult result = encode(
      &map,
      dtype == DType::kBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2,
      const_cast<void*>(base), sizes, strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return fail(ErrorCode::kInvalidArgument,
                "matrix {}: the driver refuses a map of [{}, {}], box {} x {} (CUresult {})", name,
                rows, columns, box_rows, box_columns, static_cast<int>(result));
  }
  return map;
}

Result<CUtensorMap> make_tile_map(const char* name, DType dtype, const void* base,
                                  std::int64_t tiles, std::int64_t rows, std::int64_t columns) {
  if (reinterpret_cast<std::uintptr_t>(base) % kAlignBytes != 0 || base == nullptr ||
      columns * kElementBytes % kAlignBytes != 0) {
    return fail(ErrorCode::kInvalidArgument,
                "tiles {}: the address {} and rows of {} elements must be multiples of {} bytes",
                name, fmt::ptr(base), columns, kAlignBytes);
  }
  const auto encode = encoder();
  if (encode == nullptr) {
    return fail(ErrorCode::kUnavailable,
                "no CUDA driver with tensor maps (12.0 or later) on this machine");
  }
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows),
                               static_cast<cuuint64_t>(tiles)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(columns * kElementBytes),
                                 static_cast<cuuint64_t>(rows * columns * kElementBytes)};
  const cuuint32_t box[3] = {64, 64, 1};
  const cuuint32_t element_strides[3] = {1, 1, 1};
  CUtensorMap map{};
  const CUresult result = encode(
      &map,
      dtype == DType::kBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 3,
      const_cast<void*>(base), sizes, strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return fail(ErrorCode::kInvalidArgument,
                "tiles {}: the driver refuses a map of [{}, {}, {}] (CUresult {})", name, tiles,
                rows, columns, static_cast<int>(result));
  }
  return map;
}

}  // namespace mk::kernels::cuda
