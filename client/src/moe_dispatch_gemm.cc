/// \file
/// Public MoE Dispatch+GEMM API: agrees with the other ranks on the plan, gives the executor its
/// memory, translates arguments.

#include "mkernel/moe_dispatch_gemm.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "client/src/operator_memory.h"
#include "client/src/operator_support.h"
#include "kernels/ops/moe/cpu.h"
#include "kernels/ops/moe/spec.h"

namespace mk {
namespace {

constexpr std::string_view kOp = "moe-dispatch";

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
                                   static_cast<kernels::MoeEpilogue>(shape.epilogue)};
}

/// What must be equal on all ranks, for people to compare.
std::string describe(const kernels::MoeDispatchPlan& plan) {
  const kernels::MoeDispatchShape& shape = plan.shape;
  return fmt::format(
      "tokens_max={} hidden={} features={} experts={} top_k={} rows_max={} epilogue={} dtype={} "
      "tiles={}x{} chunk_bytes={} banks={} plan={:016x}",
      shape.tokens_max, shape.hidden, shape.features, shape.experts, shape.top_k, shape.rows_max,
      kernels::name_of(shape.epilogue), kernels::name_of(plan.dtype), plan.tile_m, plan.tile_n,
      plan.tokens.chunk_bytes, plan.banks, plan.fingerprint());
}

Result<kernels::MoeDispatchPlan> plan_of(const Session& session,
                                         const MoeDispatchGemm::Shape& shape,
                                         const Tuning& tuning) {
  MK_RETURN_IF_ERROR(check_cpu_only(kOp, tuning.executor));
  MK_ASSIGN_OR_RETURN(const kernels::MoeDispatchShape kernel_shape, checked(shape));
  MK_ASSIGN_OR_RETURN(const auto dtype, checked_dtype(kOp, shape.dtype));
  const AttachOptions& options = session.options();
  return kernels::MoeDispatchPlan::make(options.nodes, options.local_size, kernel_shape, dtype,
                                        kernel_tiling(tuning));
}

}  // namespace

class __attribute__((visibility("hidden"))) MoeDispatchGemm::Impl {
 public:
  Impl(std::shared_ptr<Session::Impl> session, OperatorMemory memory,
       std::unique_ptr<kernels::MoeDispatchCpu> cpu)
      : session_(std::move(session)), memory_(std::move(memory)), cpu_(std::move(cpu)) {}

  Result<LaunchStats> launch(const Input& input, const Output& output, LaunchMode mode) {
    const kernels::MoeDispatchShape& shape = cpu_->plan().shape;
    if (input.count > shape.tokens_max) {
      return fail(ErrorCode::kInvalidArgument,
                  "{} was created for 0 to {} tokens; launched with {}", kOp, shape.tokens_max,
                  input.count);
    }
    // More room than the operator can fill is of no harm.
    const std::uint64_t capacity = std::min<std::uint64_t>(output.capacity, shape.rows_max);
    return run_launch(*session_, [&] {
      return cpu_->launch({input.tokens, input.ids, input.weights,
                           static_cast<std::uint32_t>(input.count), input.expert_weights},
                          output.y, static_cast<std::uint32_t>(capacity), kernel_mode(mode));
    });
  }

  kernels::MoeDispatchCpu& cpu() { return *cpu_; }

 private:
  std::shared_ptr<Session::Impl>
      session_;  ///< keeps the segment mapped while blocks may look at it
  OperatorMemory memory_;
  client::AtHome<kernels::MoeDispatchCpu> cpu_;  ///< goes first: its blocks use the memory above
};

Result<MoeDispatchGemm> MoeDispatchGemm::create(Session& session, const Shape& shape) {
  return create(session, shape, {});
}

Result<MoeDispatchGemm> MoeDispatchGemm::create(Session& session, const Shape& shape,
                                                const Tuning& tuning) {
  MK_ASSIGN_OR_RETURN(const auto plan, plan_of(session, shape, tuning));
  kernels::MoeDispatchCpuOptions cpu_options{kernel_options(tuning, session.options().lanes)};
  MK_ASSIGN_OR_RETURN(cpu_options.b_layout, checked_layout(kOp, shape.b_layout));
  MK_ASSIGN_OR_RETURN(auto memory,
                      OperatorMemory::create(*session.impl(), kOp, describe(plan),
                                             plan.workspace_bytes(), plan.flag_count()));
  MK_ASSIGN_OR_RETURN(auto cpu,
                      kernels::MoeDispatchCpu::create(plan, memory.context(), cpu_options));
  return MoeDispatchGemm(std::make_unique<Impl>(session.impl(), std::move(memory), std::move(cpu)));
}

Result<std::uint64_t> MoeDispatchGemm::workspace_bytes(const Session& session, const Shape& shape,
                                                       const Tuning& tuning) {
  MK_ASSIGN_OR_RETURN(const auto plan, plan_of(session, shape, tuning));
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
                                            LaunchMode mode) {
  return impl_->launch(input, output, mode);
}
std::uint32_t MoeDispatchGemm::first_expert() const { return impl_->cpu().experts().first; }
std::uint32_t MoeDispatchGemm::expert_count() const { return impl_->cpu().experts().count; }
std::span<const std::uint32_t> MoeDispatchGemm::expert_offsets() const {
  return impl_->cpu().expert_offsets();
}
std::span<const MoeRow> MoeDispatchGemm::rows() const {
  const auto rows = impl_->cpu().rows();
  return {reinterpret_cast<const MoeRow*>(rows.data()), rows.size()};
}
void MoeDispatchGemm::set_trace(bool on) { mk::set_trace(impl_->cpu().runner(), on); }
std::vector<TraceSpan> MoeDispatchGemm::trace() const { return trace_of(impl_->cpu().runner()); }

}  // namespace mk
