/// \file
/// Public MoE Dispatch+GEMM API: agrees with the other ranks on the plan, gives the executor its
/// memory, translates arguments.

#include "mkernel/moe_dispatch_gemm.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "client/src/executor_operator.h"
#include "kernels/ops/moe/cpu.h"
#include "kernels/ops/moe/spec.h"

namespace mk {
namespace {

struct MoeKind {
  static constexpr std::string_view kName = "moe-dispatch";
};
constexpr std::string_view kOp = MoeKind::kName;

// A caller reads the plan's rows where they are.
static_assert(sizeof(MoeRow) == sizeof(kernels::MoeRow) &&
              offsetof(MoeRow, rank) == offsetof(kernels::MoeRow, rank) &&
              offsetof(MoeRow, token) == offsetof(kernels::MoeRow, token) &&
              offsetof(MoeRow, slot) == offsetof(kernels::MoeRow, slot) &&
              offsetof(MoeRow, weight) == offsetof(kernels::MoeRow, weight));

Result<kernels::MoeDispatchShape> checked(const MoeDispatchGemm::Shape& shape) {
  MK_RETURN_IF_ERROR(check_dimension(kOp, "tokens_max", shape.tokens_max));
  MK_RETURN_IF_ERROR(check_dimension(kOp, "hidden", shape.hidden));
  MK_RETURN_IF_ERROR(check_dimension(kOp, "features", shape.features));
  if (shape.rows_max != 0) MK_RETURN_IF_ERROR(check_dimension(kOp, "rows_max", shape.rows_max));
  if (shape.epilogue > MoeEpilogue::kGatedSiluInterleaved) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: there is no epilogue {}; 0 is none, 1 gated SiLU, 2 the same interleaved", kOp,
                static_cast<std::uint32_t>(shape.epilogue));
  }
  return kernels::MoeDispatchShape{static_cast<std::uint32_t>(shape.tokens_max),
                                   static_cast<std::uint32_t>(shape.hidden),
                                   static_cast<std::uint32_t>(shape.features),
                                   shape.experts,
                                   shape.top_k,
                                   static_cast<std::uint32_t>(shape.rows_max),
                                   static_cast<kernels::MoeEpilogue>(shape.epilogue),
                                   shape.bias};
}

Result<DeviceMoeShape> checked_all(const MoeDispatchGemm::Shape& shape) {
  DeviceMoeShape all;
  MK_ASSIGN_OR_RETURN(all.shape, checked(shape));
  MK_ASSIGN_OR_RETURN(all.dtype, checked_dtype(kOp, shape.dtype));
  MK_ASSIGN_OR_RETURN(all.b_layout, checked_layout(kOp, shape.b_layout));
  return all;
}

Result<kernels::MoeDispatchPlan> cpu_plan(const AttachOptions& options, const DeviceMoeShape& shape,
                                          const Tuning& tuning) {
  return kernels::MoeDispatchPlan::make(options.nodes, options.local_size, shape.shape, shape.dtype,
                                        kernel_tiling(tuning));
}

}  // namespace

class __attribute__((visibility("hidden"))) MoeDispatchGemm::Impl
    : public ExecutorOperator<MoeKind, kernels::MoeDispatchCpu, DeviceMoe> {
 public:
  static Result<std::unique_ptr<Impl>> create(Session& session, const Shape& shape,
                                              const Tuning& tuning) {
    MK_ASSIGN_OR_RETURN(const DeviceMoeShape all, checked_all(shape));
    MK_ASSIGN_OR_RETURN(const bool on_device, wants_device(kOp, tuning.executor));
    MK_RETURN_IF_ERROR(check_partition(kOp, tuning, on_device));
    std::optional<kernels::MoeDispatchPlan> plan;
    kernels::CpuOptions own;
    if (on_device) {
      MK_RETURN_IF_ERROR(check_own_tiles(kOp, tuning));
    } else {
      MK_ASSIGN_OR_RETURN(plan, cpu_plan(session.options(), all, tuning));
      MK_ASSIGN_OR_RETURN(own, kernel_options(tuning, *session.impl()));
    }
    std::unique_ptr<Impl> made(new Impl(session.impl(), all.shape));
    // Its rows stay in its words, where a combine reads them.
    constexpr bool kAlone = true;
    MK_RETURN_IF_ERROR(made->find_or_make_core(
        plan, kAlone,
        [&](const kernels::RankContext& context) {
          kernels::MoeDispatchCpuOptions options{own};
          options.b_layout = all.b_layout;
          return kernels::MoeDispatchCpu::create(*plan, context, options);
        },
        [&] { return make_device_moe(*session.impl(), all, tuning); }, tuning, shape));
    if (plan) made->shape_ = plan->shape;
    return made;
  }

  Result<LaunchStats> launch(const Input& input, const Output& output, LaunchOptions options) {
    MK_RETURN_IF_ERROR(check_count(input));
    if (device() != nullptr) {
      return run_on_device(kOp, *session_, *device(), [&](CudaStream stream) {
        device()->set_tag(options.tag);
        return device()->launch(stream, kernel_input(input), output.y, output.capacity,
                                kernel_mode(options.mode));
      });
    }
    // More room than the operator can fill is of no harm.
    const std::uint64_t capacity = std::min<std::uint64_t>(output.capacity, shape_.rows_max);
    return core().note(run_launch(*session_, [&] {
      cpu().runner().set_tag(options.tag);
      return cpu().launch(kernel_input(input), output.y, static_cast<std::uint32_t>(capacity),
                          kernel_mode(options.mode));
    }));
  }
  Status launch_on(CudaStream stream, const Input& input, const Output& output,
                   LaunchOptions options) {
    MK_RETURN_IF_ERROR(check_count(input));
    return launch_on_device(kOp, *session_, device(), [&] {
      device()->set_tag(options.tag);
      return device()->launch(stream, kernel_input(input), output.y, output.capacity,
                              kernel_mode(options.mode));
    });
  }

  kernels::ShardRange experts() const {
    return device() != nullptr ? device()->experts() : cpu().experts();
  }
  std::span<const std::uint32_t> expert_offsets() const {
    return device() != nullptr ? device()->expert_offsets() : cpu().expert_offsets();
  }
  std::span<const kernels::MoeRow> rows() const {
    return device() != nullptr ? device()->rows() : cpu().rows();
  }

 private:
  Impl(std::shared_ptr<Session::Impl> session, const kernels::MoeDispatchShape& shape)
      : ExecutorOperator(std::move(session)), shape_(shape) {}

  Status check_count(const Input& input) const {
    if (input.count <= shape_.tokens_max) return {};
    return fail(ErrorCode::kInvalidArgument, "{} was created for 0 to {} tokens; launched with {}",
                kOp, shape_.tokens_max, input.count);
  }
  static kernels::MoeDispatchInput kernel_input(const Input& input) {
    return {input.tokens,         input.ids, input.weights, static_cast<std::uint32_t>(input.count),
            input.expert_weights, input.bias};
  }

  kernels::MoeDispatchShape shape_;  ///< on a CPU with rows_max as chosen
};

Result<MoeDispatchGemm> MoeDispatchGemm::create(Session& session, const Shape& shape) {
  return create(session, shape, {});
}

Result<MoeDispatchGemm> MoeDispatchGemm::create(Session& session, const Shape& shape,
                                                const Tuning& tuning) {
  MK_ASSIGN_OR_RETURN(auto made, Impl::create(session, shape, tuning));
  return MoeDispatchGemm(std::move(made));
}

Result<std::uint64_t> MoeDispatchGemm::workspace_bytes(const Session& session, const Shape& shape,
                                                       const Tuning& tuning) {
  MK_ASSIGN_OR_RETURN(const DeviceMoeShape all, checked_all(shape));
  MK_ASSIGN_OR_RETURN(const bool on_device, wants_device(kOp, tuning.executor));
  if (on_device) {
    MK_RETURN_IF_ERROR(check_own_tiles(kOp, tuning));
    return device_workspace_moe(*session.impl(), all, tuning);
  }
  MK_ASSIGN_OR_RETURN(const auto plan, cpu_plan(session.options(), all, tuning));
  return plan.workspace_bytes();
}
Result<std::uint64_t> MoeDispatchGemm::workspace_bytes(const Session& session, const Shape& shape) {
  return workspace_bytes(session, shape, {});
}

MoeDispatchGemm::MoeDispatchGemm(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
MoeDispatchGemm::MoeDispatchGemm(MoeDispatchGemm&&) noexcept = default;
MoeDispatchGemm& MoeDispatchGemm::operator=(MoeDispatchGemm&&) noexcept = default;
MoeDispatchGemm::~MoeDispatchGemm() = default;

Result<LaunchStats> MoeDispatchGemm::launch(const Input& input, const Output& output,
                                            LaunchOptions options) {
  return impl_->launch(input, output, options);
}
Status MoeDispatchGemm::launch_on(CudaStream stream, const Input& input, const Output& output,
                                  LaunchOptions options) {
  return impl_->launch_on(stream, input, output, options);
}
Status MoeDispatchGemm::status() const { return impl_->status(); }
Result<LaunchStats> MoeDispatchGemm::finish(CudaStream stream) { return impl_->finish(stream); }
std::uint32_t MoeDispatchGemm::first_expert() const { return impl_->experts().first; }
std::uint32_t MoeDispatchGemm::expert_count() const { return impl_->experts().count; }
std::span<const std::uint32_t> MoeDispatchGemm::expert_offsets() const {
  return impl_->expert_offsets();
}
std::span<const MoeRow> MoeDispatchGemm::rows() const {
  const auto rows = impl_->rows();
  return {reinterpret_cast<const MoeRow*>(rows.data()), rows.size()};
}
void MoeDispatchGemm::set_trace(bool on) { impl_->set_trace(on); }
std::vector<TraceSpan> MoeDispatchGemm::trace() const { return impl_->trace(); }

}  // namespace mk
