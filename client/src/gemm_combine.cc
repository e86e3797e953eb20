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

#include "client/src/expert_operator.h"
#include "kernels/ops/combine/cpu.h"
#include "kernels/ops/combine/spec.h"

namespace mk {
namespace {

constexpr std::string_view kOp = "combine";

Result<kernels::CombineShape> checked_shape(const GemmCombine::Shape& shape) {
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

struct CombineKind : ExpertKind<CombineKind, GemmCombine, DeviceCombineShape, kernels::CombinePlan,
                                kernels::CombineCpu, DeviceCombine> {
  static constexpr std::string_view kName = kOp;
  static constexpr bool kAlone = false;
  static constexpr auto make_device = &make_device_combine;
  static constexpr auto device_bytes = &device_workspace_combine;

  static Result<Checked> checked(const Shape& shape) {
    return checked_experts<Checked>(kOp, shape, checked_shape);
  }
  static Result<std::unique_ptr<Cpu>> make_cpu(const Plan& plan, const Checked& checked,
                                               const kernels::RankContext& context,
                                               const kernels::CpuOptions& own,
                                               const Tuning& tuning) {
    kernels::CombineCpuOptions options{own};
    options.b_layout = checked.b_layout;
    options.count_nonfinite = tuning.count_nonfinite;
    return Cpu::create(plan, context, options);
  }
};

}  // namespace

class __attribute__((visibility("hidden"))) GemmCombine::Impl : public Operator<CombineKind> {
 public:
  using Operator::make;
  using Operator::Operator;

  Result<LaunchStats> launch(const Input& input, void* out, LaunchOptions options) {
    MK_RETURN_IF_ERROR(check_count(kOp, shape().tokens_max, input.count));
    return run(
        options, [&](CudaStream stream) { return put_on(stream, input, out, options); },
        [&] { return cpu().launch(cpu_input(input), out, kernel_mode(options.mode)); });
  }
  Status launch_on(CudaStream stream, const Input& input, void* out, LaunchOptions options) {
    MK_RETURN_IF_ERROR(check_count(kOp, shape().tokens_max, input.count));
    return put(options, [&] { return put_on(stream, input, out, options); });
  }

  kernels::ShardRange experts() const {
    return device() != nullptr ? device()->experts() : cpu().experts();
  }

 private:
  const kernels::CombineShape& shape() const { return checked().shape; }
  static const kernels::MoeRow* rows_of(const Input& input) {
    return reinterpret_cast<const kernels::MoeRow*>(input.rows.data());
  }
  Status put_on(CudaStream stream, const Input& input, void* out, LaunchOptions options) {
    MK_RETURN_IF_ERROR(check_handle(input));
    return device()->launch(stream, device_input(input), out, kernel_mode(options.mode));
  }
  /// As much of a handle in the GPU's memory as the host can see.
  Status check_handle(const Input& input) const {
    const std::size_t offsets = experts().count + std::size_t{1};
    if (input.expert_offsets.size() == offsets) return {};
    return fail(ErrorCode::kInvalidArgument,
                "{}: {} expert offsets; this rank has {} experts, so it takes {}", kOp,
                input.expert_offsets.size(), offsets - 1, offsets);
  }
  static kernels::CombineInput cpu_input(const Input& input) {
    kernels::CombineInput of_cpu;
    of_cpu.y = input.y;
    of_cpu.rows = {rows_of(input), input.rows.size()};
    of_cpu.offsets = input.expert_offsets;
    of_cpu.expert_weights = input.expert_weights;
    of_cpu.ids = input.ids;
    of_cpu.count = static_cast<std::uint32_t>(input.count);
    of_cpu.residual = input.residual;
    return of_cpu;
  }
  kernels::CombineDeviceInput device_input(const Input& input) const {
    // More room than there can be rows is of no harm.
    const AttachOptions& options = session_->options();
    const std::uint64_t most =
        std::uint64_t{options.nodes} * options.local_size * shape().tokens_max * shape().top_k;
    return {input.y,
            rows_of(input),
            input.expert_offsets.data(),
            static_cast<std::uint32_t>(std::min<std::uint64_t>(input.rows.size(), most)),
            input.expert_weights,
            input.ids,
            static_cast<std::uint32_t>(input.count),
            input.residual};
  }
};

Result<GemmCombine> GemmCombine::create(Session& session, const Shape& shape) {
  return create(session, shape, {});
}

Result<GemmCombine> GemmCombine::create(Session& session, const Shape& shape,
                                        const Tuning& tuning) {
  MK_ASSIGN_OR_RETURN(auto made, Impl::make<Impl>(session, shape, tuning));
  return GemmCombine(std::move(made));
}

Result<std::uint64_t> GemmCombine::workspace_bytes(const Session& session, const Shape& shape,
                                                   const Tuning& tuning) {
  return Impl::workspace_bytes(session, shape, tuning);
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
