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

#include "client/src/expert_operator.h"
#include "kernels/ops/moe/cpu.h"
#include "kernels/ops/moe/spec.h"

namespace mk {
namespace {

constexpr std::string_view kOp = "moe-dispatch";

Result<kernels::MoeDispatchShape> checked_shape(const MoeDispatchGemm::Shape& shape) {
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

struct MoeKind : ExpertKind<MoeKind, MoeDispatchGemm, DeviceMoeShape, kernels::MoeDispatchPlan,
                            kernels::MoeDispatchCpu, DeviceMoe> {
  static constexpr std::string_view kName = kOp;
  static constexpr bool kAlone = true;  // its rows stay in its words, where a combine reads them
  static constexpr auto make_device = &make_device_moe;
  static constexpr auto device_bytes = &device_workspace_moe;

  static Result<Checked> checked(const Shape& shape) {
    return checked_experts<Checked>(kOp, shape, checked_shape);
  }
  static Result<std::unique_ptr<Cpu>> make_cpu(const Plan& plan, const Checked& checked,
                                               const kernels::RankContext& context,
                                               const kernels::CpuOptions& own, const Tuning&) {
    kernels::MoeDispatchCpuOptions options{own};
    options.b_layout = checked.b_layout;
    return Cpu::create(plan, context, options);
  }
};

}  // namespace

class __attribute__((visibility("hidden"))) MoeDispatchGemm::Impl : public Operator<MoeKind> {
 public:
  using Operator::make;
  using Operator::Operator;

  Result<LaunchStats> launch(const Input& input, const Output& output, LaunchOptions options) {
    MK_RETURN_IF_ERROR(check_count(kOp, checked().shape.tokens_max, input.count));
    return run(
        options, [&](CudaStream stream) { return put_on(stream, input, output, options); },
        [&] {
          // More room than the operator can fill is of no harm.
          const std::uint64_t capacity =
              std::min<std::uint64_t>(output.capacity, cpu().plan().shape.rows_max);
          return cpu().launch(kernel_input(input), output.y, static_cast<std::uint32_t>(capacity),
                              kernel_mode(options.mode));
        });
  }
  Status launch_on(CudaStream stream, const Input& input, const Output& output,
                   LaunchOptions options) {
    MK_RETURN_IF_ERROR(check_count(kOp, checked().shape.tokens_max, input.count));
    return put(options, [&] { return put_on(stream, input, output, options); });
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
  Status put_on(CudaStream stream, const Input& input, const Output& output,
                LaunchOptions options) {
    return device()->launch(stream, kernel_input(input), output.y, output.capacity,
                            kernel_mode(options.mode));
  }
  static kernels::MoeDispatchInput kernel_input(const Input& input) {
    return {input.tokens,         input.ids, input.weights, static_cast<std::uint32_t>(input.count),
            input.expert_weights, input.bias};
  }
};

Result<MoeDispatchGemm> MoeDispatchGemm::create(Session& session, const Shape& shape) {
  return create(session, shape, {});
}

Result<MoeDispatchGemm> MoeDispatchGemm::create(Session& session, const Shape& shape,
                                                const Tuning& tuning) {
  MK_ASSIGN_OR_RETURN(auto made, Impl::make<Impl>(session, shape, tuning));
  return MoeDispatchGemm(std::move(made));
}

Result<std::uint64_t> MoeDispatchGemm::workspace_bytes(const Session& session, const Shape& shape,
                                                       const Tuning& tuning) {
  return Impl::workspace_bytes(session, shape, tuning);
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
