#include "client/src/gemm_matrices.h"

#include <fmt/format.h>

namespace mk {
namespace {

constexpr std::uint64_t kAlignBytes = 16;  ///< of the copy engine's addresses and pitches
constexpr std::uint64_t kElementBytes = kernels::kElementBytes;
/// In elements: offsets in the largest matrix fit 63 bits, and a tensor map takes the stride.
constexpr std::uint64_t kPitchMax = std::uint64_t{1} << 38;

/// A matrix in memory; no rows: there is none.
struct Placed {
  const char* name;
  std::uintptr_t base;
  std::uint64_t rows;
  std::uint64_t row_bytes;
  std::uint64_t pitch_bytes;

  std::uintptr_t row(std::uint64_t i) const { return base + i * pitch_bytes; }
  std::uintptr_t end() const { return row(rows - 1) + row_bytes; }
};

Placed placed(const char* name, const void* base, std::uint64_t rows, std::uint64_t columns,
              std::uint64_t pitch) {
  return {name, reinterpret_cast<std::uintptr_t>(base), base == nullptr ? 0 : rows,
          columns * kElementBytes, pitch * kElementBytes};
}

/// Whether a byte is in a row of both. Matrices may lie side by side in rows of one buffer.
bool share_memory(const Placed& x, const Placed& y) {
  if (x.rows == 0 || y.rows == 0 || x.end() <= y.base || y.end() <= x.base) return false;
  std::uint64_t i = 0;
  std::uint64_t j = 0;
  while (i < x.rows && j < y.rows) {
    if (x.row(i) + x.row_bytes <= y.row(j)) {
      ++i;
    } else if (y.row(j) + y.row_bytes <= x.row(i)) {
      ++j;
    } else {
      return true;
    }
  }
  return false;
}

Status check_apart(std::string_view op, const Placed& written, const Placed& other) {
  if (!share_memory(written, other)) return {};
  return fail(
      ErrorCode::kInvalidArgument,
      "{}: {} ({} rows of {} bytes, {} apart, from {:#x} on) shares memory with {} ({} rows of "
      "{} bytes, {} apart, from {:#x} on); give it memory of its own",
      op, written.name, written.rows, written.row_bytes, written.pitch_bytes, written.base,
      other.name, other.rows, other.row_bytes, other.pitch_bytes, other.base);
}

Status check_pitch(std::string_view op, const char* name, std::uint64_t pitch) {
  if (pitch <= kPitchMax) return {};
  return fail(ErrorCode::kInvalidArgument,
              "{}: {} = {} is too large; from row to row there are at most {} elements", op, name,
              pitch, kPitchMax);
}

Status check_placed(std::string_view op, const Placed& matrix, const char* pitch, bool on_device) {
  if (matrix.rows == 0) return {};
  if (matrix.pitch_bytes < matrix.row_bytes) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: {} = {} is too small: rows of {} have {} elements and would overlap", op,
                pitch, matrix.pitch_bytes / kElementBytes, matrix.name,
                matrix.row_bytes / kElementBytes);
  }
  if (!on_device) return {};
  if (matrix.base % kAlignBytes != 0) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: {} lies at {:#x}; on a GPU it must lie at a multiple of {} bytes", op,
                matrix.name, matrix.base, kAlignBytes);
  }
  if (matrix.rows > 1 && matrix.pitch_bytes % kAlignBytes != 0) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: {} = {} must be a multiple of {} elements on a GPU: pad the rows of {}", op,
                pitch, matrix.pitch_bytes / kElementBytes, kAlignBytes / kElementBytes,
                matrix.name);
  }
  return {};
}

}  // namespace

Result<kernels::GemmMatrices> checked_matrices(std::string_view op, const DeviceShape& shape,
                                               const GemmRows& rows,
                                               const kernels::GemmMatrices& given, bool on_device) {
  const kernels::Shape& of = shape.shape;
  const bool kn = shape.b_layout == kernels::BLayout::kKN;
  kernels::GemmMatrices full = given;
  if (full.lda == 0) full.lda = of.k;
  if (full.ldb == 0) full.ldb = kn ? of.n : of.k;
  const std::uint32_t c_columns = shape.result.epilogue.columns_of(of.n);
  if (full.ldc == 0) full.ldc = c_columns;
  // Also where a matrix has no rows: executors look at its pitch.
  MK_RETURN_IF_ERROR(check_pitch(op, "lda", full.lda));
  MK_RETURN_IF_ERROR(check_pitch(op, "ldb", full.ldb));
  MK_RETURN_IF_ERROR(check_pitch(op, "ldc", full.ldc));
  const Placed a = placed("a", full.a, rows.a, of.k, full.lda);
  const Placed b = placed("b", full.b, kn ? of.k : of.n, kn ? of.n : of.k, full.ldb);
  const Placed c = placed("c", full.c, rows.c, c_columns, full.ldc);
  const Placed bias = placed("bias", full.bias, 1, of.n, of.n);
  const Placed gathered = placed("gathered", full.gathered, rows.c, of.k, of.k);
  MK_RETURN_IF_ERROR(check_placed(op, a, "lda", on_device));
  MK_RETURN_IF_ERROR(check_placed(op, b, "ldb", on_device));
  MK_RETURN_IF_ERROR(check_placed(op, c, "ldc", on_device));
  MK_RETURN_IF_ERROR(check_placed(op, bias, "n", on_device));
  MK_RETURN_IF_ERROR(check_placed(op, gathered, "k", on_device));
  for (const Placed* other : {&a, &b, &bias, &gathered})
    MK_RETURN_IF_ERROR(check_apart(op, c, *other));
  for (const Placed* other : {&a, &b, &bias}) MK_RETURN_IF_ERROR(check_apart(op, gathered, *other));
  return full;
}

}  // namespace mk
