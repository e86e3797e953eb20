#include "kernels/ops/ring/tensors.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/ops/ring/windows.h"

namespace mk::kernels {
namespace {

constexpr const char* kOp = "ring_attention";
constexpr std::uint64_t kStrideMax = std::uint64_t{1} << 40;  // sums of products with counts fit

/// `dim`: elements of a head.
Status fill_in(const char* name, RingStrides& strides, const RingAttentionGeometry& plan,
               std::uint32_t rows, std::uint32_t heads, std::uint32_t dim) {
  // Where there is one of them only, any stride will do.
  if (strides.head == 0 || heads == 1) strides.head = dim;
  if (strides.row == 0 || rows <= 1) strides.row = std::uint64_t{heads} * dim;
  if (strides.batch == 0 || plan.batch == 1)
    strides.batch = std::max(rows * strides.row, heads * strides.head);
  struct Dimension {
    const char* things;
    std::uint64_t stride;
    std::uint64_t count;
  };
  std::array<Dimension, 3> dimensions{Dimension{"heads", strides.head, heads},
                                      {"rows", strides.row, rows},
                                      {"batches", strides.batch, plan.batch}};
  std::ranges::stable_sort(dimensions, {}, &Dimension::stride);
  std::uint64_t elements = dim;  // from the first to the last of one of them
  for (const Dimension& dimension : dimensions) {
    if (dimension.count <= 1) continue;
    if (dimension.stride < elements || dimension.stride > kStrideMax) {
      return fail(ErrorCode::kInvalidArgument,
                  "{}: {} of {} are {} elements apart; they have {} elements", kOp,
                  dimension.things, name, dimension.stride, elements);
    }
    elements += (dimension.count - 1) * dimension.stride;
  }
  return {};
}

}  // namespace

Result<RingAttentionTensors> checked_tensors(const RingAttentionGeometry& plan,
                                             RingAttentionTensors tensors, std::uint32_t rows) {
  for (const auto& [name, tensor] : {std::pair<const char*, const void*>{"q", tensors.q},
                                     {"k", tensors.k},
                                     {"v", tensors.v},
                                     {"out", tensors.out}}) {
    if (tensor == nullptr && rows != 0)
      return fail(ErrorCode::kInvalidArgument, "{}: {} is null", kOp, name);
  }
  const auto fill = [&](const char* name, RingStrides& strides, std::uint32_t heads,
                        std::uint32_t dim) {
    return fill_in(name, strides, plan, rows, heads, dim);
  };
  MK_RETURN_IF_ERROR(fill("q", tensors.q_strides, plan.query_heads, plan.head_dim));
  MK_RETURN_IF_ERROR(fill("k", tensors.k_strides, plan.key_heads, plan.head_dim));
  MK_RETURN_IF_ERROR(fill("v", tensors.v_strides, plan.key_heads, plan.head_dim));
  MK_RETURN_IF_ERROR(fill("out", tensors.out_strides, plan.query_heads, plan.head_dim));
  MK_RETURN_IF_ERROR(fill("lse", tensors.lse_strides, plan.query_heads, 1));
  if (!std::isfinite(tensors.scale)) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: a scale of {} is not possible; it must be finite (0: 1 / sqrt(head_dim))", kOp,
                tensors.scale);
  }
  if (tensors.scale == 0) tensors.scale = 1 / std::sqrt(double{static_cast<float>(plan.head_dim)});
  return tensors;
}

RingAttentionTensors of_window(const RingAttentionGeometry& its, RingAttentionTensors tensors,
                               const HeadWindow& heads) {
  const auto first = [&](const RingStrides& strides, std::uint32_t group) {
    return first_of_window(heads, group, strides.batch, strides.head);
  };
  // A rank without rows may have no tensors.
  const auto elements = [](const void* tensor, std::uint64_t before) -> const std::uint16_t* {
    return tensor == nullptr ? nullptr : static_cast<const std::uint16_t*>(tensor) + before;
  };
  tensors.q = elements(tensors.q, first(tensors.q_strides, its.group()));
  tensors.k = elements(tensors.k, first(tensors.k_strides, 1));
  tensors.v = elements(tensors.v, first(tensors.v_strides, 1));
  tensors.out =
      const_cast<std::uint16_t*>(elements(tensors.out, first(tensors.out_strides, its.group())));
  if (tensors.lse != nullptr) tensors.lse += first(tensors.lse_strides, its.group());
  return tensors;
}

}  // namespace mk::kernels
