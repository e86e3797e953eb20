#include "kernels/cuda/host/operator_inputs.h"

#include "kernels/comm/plan_tools.h"
#include "kernels/cuda/core/tensor_map.h"
#include "kernels/cuda/core/tile_limits.h"

namespace mk::kernels::cuda {
namespace {

constexpr std::uint64_t kAlignBytes = 16;
constexpr std::uint32_t kSideKMax = 1u << 24;

}  // namespace

Result<ProductArguments> make_product(const ProductInputs& in, const BBox& b_box) {
  const bool nk = in.b_layout == kernels::BLayout::kNK;
  const std::uint64_t b_side = nk ? in.k : in.n;
  if ((in.a_rows != 0 && in.lda < in.k) || in.ldb < b_side) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: leading dimensions a {}, b {} are too small; at least {}, {}", in.op, in.lda,
                in.ldb, in.k, b_side);
  }
  const auto type = cuda_type(in.dtype);
  ProductArguments product;
  product.a_box_rows = static_cast<int>(in.a_box_rows);
  product.k_blocks = static_cast<int>(div_up(in.k, kBlockK));
  if (in.a_rows != 0) {
    MK_ASSIGN_OR_RETURN(
        product.a, make_tensor_map("A", type, in.a, in.a_rows, in.k,
                                   static_cast<std::int64_t>(in.lda), product.a_box_rows, kBlockK));
  }
  MK_ASSIGN_OR_RETURN(
      product.b, make_tensor_map("B", type, in.b, nk ? in.n : in.k, nk ? in.k : in.n,
                                 static_cast<std::int64_t>(in.ldb), b_box.rows, b_box.columns));
  return product;
}

Status check_c(const char* op, const void* c, std::uint64_t ldc, std::uint32_t n) {
  if (ldc < n) {
    return fail(ErrorCode::kInvalidArgument, "{}: the leading dimension of c, {}, is less than {}",
                op, ldc, n);
  }
  if (c == nullptr || reinterpret_cast<std::uintptr_t>(c) % kAlignBytes != 0 ||
      ldc % kElementStep != 0) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: c must lie at a multiple of {} bytes, its rows a multiple of {} elements "
                "apart ({})",
                op, kAlignBytes, kElementStep, ldc);
  }
  return {};
}

Status check_summed_c(const char* op, const void* c, std::uint64_t ldc, std::uint32_t rows,
                      std::uint32_t n) {
  MK_RETURN_IF_ERROR(check_c(op, c, ldc, n));
  // VectorWalk counts vectors of 16 bytes.
  constexpr std::uint64_t kVectorsMax = 1ull << 32;
  if (rows > 1 && ldc / kElementStep > kVectorsMax / rows) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: c, {} rows that lie {} elements apart, spans more than 64 GiB", op, rows, ldc);
  }
  return {};
}

Status check_gated(const char* op, const Epilogue& epilogue, std::uint32_t n) {
  if (!epilogue.gated() || n % (2 * kElementStep) == 0) return {};
  return fail(
      ErrorCode::kInvalidArgument,
      "{}: gated SiLU makes n / 2 columns, a multiple of {} on a GPU; n = {} is no multiple of "
      "{}: pad it",
      op, kElementStep, n, 2 * kElementStep);
}

Status check_bias(const char* op, const Epilogue& epilogue, const void* bias) {
  MK_RETURN_IF_ERROR(kernels::check_bias(op, epilogue, bias));
  if (reinterpret_cast<std::uintptr_t>(bias) % kAlignBytes == 0) return {};
  return fail(ErrorCode::kInvalidArgument, "{}: bias must lie at a multiple of {} bytes", op,
              kAlignBytes);
}

Status check_m(const char* op, std::uint32_t m, std::uint32_t max) {
  if (m >= 1 && m <= max) return {};
  return fail(ErrorCode::kInvalidArgument,
              "{}: m = {} is not in 1 to {}, which the operator was made for", op, m, max);
}

Status check_shape(const char* op, std::uint32_t tile_m, std::uint32_t tile_n, std::uint32_t n,
                   std::uint32_t k) {
  if (tile_m > kTileRowsMax || tile_n > kTileColumnsMax) {
    return fail(ErrorCode::kUnsupported,
                "{}: tiles of {} x {}: the CUDA operator's are at most {} x {}", op, tile_m, tile_n,
                kTileRowsMax, kTileColumnsMax);
  }
  if (k < 1 || k > kSideKMax || k % kElementStep != 0 || n % kElementStep != 0) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: n = {} and k = {} must be multiples of {}, k at most {}: pad them", op, n, k,
                kElementStep, kSideKMax);
  }
  return {};
}

}  // namespace mk::kernels::cuda
