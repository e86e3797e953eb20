/// \file
/// What the two halves of a MoE layer check alike.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "client/src/executor_operator.h"
#include "kernels/ops/moe/spec.h"
#include "mkernel/types.h"

namespace mk {

// One half shows the plan's rows where they are, and the other reads them there.
static_assert(sizeof(MoeRow) == sizeof(kernels::MoeRow) &&
              offsetof(MoeRow, rank) == offsetof(kernels::MoeRow, rank) &&
              offsetof(MoeRow, token) == offsetof(kernels::MoeRow, token) &&
              offsetof(MoeRow, slot) == offsetof(kernels::MoeRow, slot) &&
              offsetof(MoeRow, weight) == offsetof(kernels::MoeRow, weight));

/// A public shape as a `Checked`; `checked_shape(shape)` passes the operator's own part.
template <class Checked, class Shape, class CheckedShape>
Result<Checked> checked_experts(std::string_view op, const Shape& shape,
                                CheckedShape&& checked_shape) {
  MK_RETURN_IF_ERROR(check_dimension(op, "tokens_max", shape.tokens_max));
  MK_RETURN_IF_ERROR(check_dimension(op, "hidden", shape.hidden));
  MK_RETURN_IF_ERROR(check_dimension(op, "features", shape.features));
  Checked checked;
  MK_ASSIGN_OR_RETURN(checked.shape, checked_shape(shape));
  MK_ASSIGN_OR_RETURN(checked.dtype, checked_dtype(op, shape.dtype));
  MK_ASSIGN_OR_RETURN(checked.b_layout, checked_layout(op, shape.b_layout));
  return checked;
}

/// The part of a Kind (executor_operator.h) that both have alike; `Kind` derives from it.
template <class Kind, class Public, class CheckedShape, class PlanOf, class CpuOf, class DeviceOf>
struct ExpertKind {
  static constexpr bool kAdapts = true;
  using Shape = typename Public::Shape;
  using Tuning = mk::Tuning;
  using Checked = CheckedShape;
  using Plan = PlanOf;
  using Cpu = CpuOf;
  using Device = DeviceOf;

  static Status check_tuning(const Tuning& tuning, bool on_device) {
    return on_device ? check_own_tiles(Kind::kName, tuning) : Status{};
  }
  static Result<Plan> cpu_plan(const AttachOptions& options, const Checked& checked,
                               const Tuning& tuning) {
    return Plan::make(options.nodes, options.local_size, checked.shape, checked.dtype,
                      kernel_tiling(tuning));
  }
};

/// A launch's tokens.
inline Status check_count(std::string_view op, std::uint64_t most, std::uint64_t count) {
  if (count <= most) return {};
  return fail(ErrorCode::kInvalidArgument, "{} was created for 0 to {} tokens; launched with {}",
              op, most, count);
}

}  // namespace mk
