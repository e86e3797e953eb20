/// \file
/// Public GEMM+Combine API: agrees with the other ranks on the plan, gives the executor its memory,
/// translates arguments.

#include "mkernel/gemm_combine.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "client/src/executor_operator.h"
#include "kernels/ops/combine/cpu.h"
#include "kernels/ops/combine/spec.h"

namespace mk {
namespace {

struct CombineKind {
  static constexpr std::string_view kName = "combine";
};
constexpr std::string_view kOp = CombineKind::kName;

// The executor reads the caller's rows where they are.
static_assert(sizeof(MoeRow) == sizeof(kernels::MoeRow) &&
              offsetof(MoeRow, rank) == offsetof(kernels::MoeRow, rank) &&
              offsetof(MoeRow, token) == offsetof(kernels::MoeRow, token) &&
              offsetof(MoeRow, slot) == offsetof(kernels::MoeRow, slot) &&
              offsetof(MoeRow, weight) == offsetof(kernels::MoeRow, weight));

Result<kernels::CombineShape> checked(const GemmCombine::Shape& shape) {
  MK_RETURN_IF_ERROR(check_dimension(kOp, "tokens_max", shape.tokens_max));
  MK_RETURN_IF_ERROR(check_dimension(kOp, "hidden", shape.hidden));
  MK_RETURN_IF_ERROR(check_dimension(kOp, "features", shape.features));
  if (shape.partials != Partials::kElement && shape.partials != Partials::kF32) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: partials travel as elements (0) or in fp32 (1), not as {}", kOp,
                static_cast<std::uint32_t>(shape.partials));
  }
  return kernels::CombineShape{static_cast<std::uint32_t>(shape.tokens_max),
                               static_cast<std::uint32_t>(shape.hidden),
                               static_cast<std::uint32_t>(shape.features),
                               shape.experts,
                               shape.top_k,
                               shape.partials == Partials::kF32
                                   ? kernels::CombinePartials::kF32
                                   : kernels::CombinePartials::kElement};
}

Result<DeviceCombineShape> checked_all(const GemmCombine::Shape& shape) {
  DeviceCombineShape all;
  MK_ASSIGN_OR_RETURN(all.shape, checked(shape));
  MK_ASSIGN_OR_RETURN(all.dtype, checked_dtype(kOp, shape.dtype));
  MK_ASSIGN_OR_RETURN(all.b_layout, checked_layout(kOp, shape.b_layout));
  return all;
}

Result<kernels::CombinePlan> cpu_plan(const AttachOptions& options, const DeviceCombineShape& shape,
                                      const Tuning& tuning) {
  return kernels::CombinePlan::make(options.nodes, options.local_size, shape.shape, shape.dtype,
                                    kernel_tiling(tuning));
}

}  // namespace

class __attribute__((visibility("hidden"))) GemmCombine::Impl
    : public ExecutorOperator<CombineKind, kernels::CombineCpu, DeviceCombine> {
 public:
  static Result<std::unique_ptr<Impl>> create(Session& session, const Shape& shape,
                                              const Tuning& tuning) {
    MK_ASSIGN_OR_RETURN(const DeviceCombineShape all, checked_all(shape));
    MK_ASSIGN_OR_RETURN(const bool on_device, wants_device(kOp, tuning.executor));
    MK_RETURN_IF_ERROR(check_partition(kOp, tuning, on_device));
    std::optional<kernels::CombinePlan> plan;
    kernels::CpuOptions own;
    if (on_device) {
      MK_RETURN_IF_ERROR(check_own_tiles(kOp, tuning));
    } else {
      MK_ASSIGN_OR_RETURN(plan, cpu_plan(session.options(), all, tuning));
      MK_ASSIGN_OR_RETURN(own, kernel_options(tuning, *session.impl()));
    }
    std::unique_ptr<Impl> made(new Impl(session.impl(), all.shape));
    MK_RETURN_IF_ERROR(made->find_or_make_core(
        plan, false,
        [&](const kernels::RankContext& context) {
          kernels::CombineCpuOptions options{own};
          options.b_layout = all.b_layout;
          options.count_nonfinite = tuning.count_nonfinite;
          return kernels::CombineCpu::create(*plan, context, options);
        },
        [&] { return make_device_combine(*session.impl(), all, tuning); }, tuning, shape));
    return made;
  }

  Result<LaunchStats> launch(const Input& input, void* out, LaunchOptions options) {
    MK_RETURN_IF_ERROR(check_count(input));
    if (device() != nullptr) {
      MK_RETURN_IF_ERROR(check_handle(input));
      return run_on_device(kOp, *session_, *device(), [&](CudaStream stream) {
        device()->set_tag(options.tag);
        return device()->launch(stream, device_input(input), out, kernel_mode(options.mode));
      });
    }
    kernels::CombineInput of_cpu;
    of_cpu.y = input.y;
    of_cpu.rows = {rows_of(input), input.rows.size()};
    of_cpu.offsets = input.expert_offsets;
    of_cpu.expert_weights = input.expert_weights;
    of_cpu.ids = input.ids;
    of_cpu.count = static_cast<std::uint32_t>(input.count);
    of_cpu.residual = input.residual;
    return core().note(run_launch(*session_, [&] {
      cpu().runner().set_tag(options.tag);
      return cpu().launch(of_cpu, out, kernel_mode(options.mode));
    }));
  }
  Status launch_on(CudaStream stream, const Input& input, void* out, LaunchOptions options) {
    MK_RETURN_IF_ERROR(check_count(input));
    return launch_on_device(kOp, *session_, device(), [&]() -> Status {
      MK_RETURN_IF_ERROR(check_handle(input));
      device()->set_tag(options.tag);
      return device()->launch(stream, device_input(input), out, kernel_mode(options.mode));
    });
  }

  kernels::ShardRange experts() const {
    return device() != nullptr ? device()->experts() : cpu().experts();
  }

 private:
  Impl(std::shared_ptr<Session::Impl> session, const kernels::CombineShape& shape)
      : ExecutorOperator(std::move(session)), shape_(shape) {}

  static const kernels::MoeRow* rows_of(const Input& input) {
    return reinterpret_cast<const kernels::MoeRow*>(input.rows.data());
  }
  Status check_count(const Input& input) const {
    if (input.count <= shape_.tokens_max) return {};
    return fail(ErrorCode::kInvalidArgument, "{} was created for 0 to {} tokens; launched with {}",
                kOp, shape_.tokens_max, input.count);
  }
  /// What of a handle in the GPU's memory the host can see.
  Status check_handle(const Input& input) const {
    const std::size_t offsets = experts().count + std::size_t{1};
    if (input.expert_offsets.size() == offsets) return {};
    return fail(ErrorCode::kInvalidArgument,
                "{}: {} expert offsets; this rank has {} experts, so it takes {}", kOp,
                input.expert_offsets.size(), offsets - 1, offsets);
  }
  kernels::CombineDeviceInput device_input(const Input& input) const {
    // More room than there can be rows is of no harm.
    const AttachOptions& options = session_->options();
    const std::uint64_t most =
        std::uint64_t{options.nodes} * options.local_size * shape_.tokens_max * shape_.top_k;
    return {input.y,
            rows_of(input),
            input.expert_offsets.data(),
            static_cast<std::uint32_t>(std::min<std::uint64_t>(input.rows.size(), most)),
            input.expert_weights,
            input.ids,
            static_cast<std::uint32_t>(input.count),
            input.residual};
  }

  const kernels::CombineShape shape_;
};

Result<GemmCombine> GemmCombine::create(Session& session, const Shape& shape) {
  return create(session, shape, {});
}

Result<GemmCombine> GemmCombine::create(Session& session, const Shape& shape,
                                        const Tuning& tuning) {
  MK_ASSIGN_OR_RETURN(auto made, Impl::create(session, shape, tuning));
  return GemmCombine(std::move(made));
}

Result<std::uint64_t> GemmCombine::workspace_bytes(const Session& session, const Shape& shape,
                                                   const Tuning& tuning) {
  MK_ASSIGN_OR_RETURN(const DeviceCombineShape all, checked_all(shape));
  MK_ASSIGN_OR_RETURN(const bool on_device, wants_device(kOp, tuning.executor));
  if (on_device) {
    MK_RETURN_IF_ERROR(check_own_tiles(kOp, tuning));
    return device_workspace_combine(*session.impl(), all, tuning);
  }
  MK_ASSIGN_OR_RETURN(const auto plan, cpu_plan(session.options(), all, tuning));
  return plan.workspace_bytes();
}
Result<std::uint64_t> GemmCombine::workspace_bytes(const Session& session, const Shape& shape) {
  return workspace_bytes(session, shape, {});
}

GemmCombine::GemmCombine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
GemmCombine::GemmCombine(GemmCombine&&) noexcept = default;
GemmCombine& GemmCombine::operator=(GemmCombine&&) noexcept = default;
GemmCombine::~GemmCombine() = default;

Result<LaunchStats> GemmCombine::launch(const Input& input, void* out, LaunchOptions options) {
  return impl_->launch(input, out, options);
}
Status GemmCombine::launch_on(CudaStream stream, const Input& input, void* out,
                              LaunchOptions options) {
  return impl_->launch_on(stream, input, out, options);
}
Status GemmCombine::status() const { return impl_->status(); }
Result<LaunchStats> GemmCombine::finish(CudaStream stream) { return impl_->finish(stream); }
std::uint32_t GemmCombine::first_expert() const { return impl_->experts().first; }
std::uint32_t GemmCombine::expert_count() const { return impl_->experts().count; }
void GemmCombine::set_trace(bool on) { impl_->set_trace(on); }
std::vector<TraceSpan> GemmCombine::trace() const { return impl_->trace(); }

}  // namespace mk
