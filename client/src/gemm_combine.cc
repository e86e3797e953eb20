/// \file
/// GEMM+Combine for people: agrees with the other ranks on the plan, gives the executor its memory,
/// translates arguments.

#include "mkernel/gemm_combine.h"

#include <cstddef>
#include <utility>

#include "client/src/operator_memory.h"
#include "client/src/operator_support.h"
#include "kernels/ops/combine/cpu.h"
#include "kernels/ops/combine/spec.h"

namespace mk {
namespace {

constexpr std::string_view kOp = "combine";

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

/// What must be equal on all ranks, for people to compare.
std::string describe(const kernels::CombinePlan& plan) {
  const kernels::CombineShape& shape = plan.shape;
  return fmt::format(
      "tokens_max={} hidden={} features={} experts={} top_k={} partials={} dtype={} tiles={}x{} "
      "chunk_tokens={} banks={} plan={:016x}",
      shape.tokens_max, shape.hidden, shape.features, shape.experts, shape.top_k,
      kernels::name_of(shape.partials), kernels::name_of(plan.dtype), plan.tile_m, plan.tile_n,
      plan.chunk_tokens, plan.banks, plan.fingerprint());
}

Result<kernels::CombinePlan> plan_of(const Session& session, const GemmCombine::Shape& shape,
                                     const Tuning& tuning) {
  MK_RETURN_IF_ERROR(check_cpu_only(kOp, tuning.executor));
  MK_ASSIGN_OR_RETURN(const kernels::CombineShape kernel_shape, checked(shape));
  MK_ASSIGN_OR_RETURN(const auto dtype, checked_dtype(kOp, shape.dtype));
  const AttachOptions& options = session.options();
  return kernels::CombinePlan::make(options.nodes, options.local_size, kernel_shape, dtype,
                                    kernel_tiling(tuning));
}

}  // namespace

class __attribute__((visibility("hidden"))) GemmCombine::Impl {
 public:
  Impl(std::shared_ptr<Session::Impl> session, OperatorMemory memory,
       std::unique_ptr<kernels::CombineCpu> cpu)
      : session_(std::move(session)), memory_(std::move(memory)), cpu_(std::move(cpu)) {}

  Result<LaunchStats> launch(const Input& input, void* out, LaunchMode mode) {
    const kernels::CombineShape& shape = cpu_->plan().shape;
    if (input.count > shape.tokens_max) {
      return fail(ErrorCode::kInvalidArgument,
                  "{} was created for 0 to {} tokens; launched with {}", kOp, shape.tokens_max,
                  input.count);
    }
    kernels::CombineInput of_cpu;
    of_cpu.y = input.y;
    of_cpu.rows = {reinterpret_cast<const kernels::MoeRow*>(input.rows.data()), input.rows.size()};
    of_cpu.offsets = input.expert_offsets;
    of_cpu.expert_weights = input.expert_weights;
    of_cpu.ids = input.ids;
    of_cpu.count = static_cast<std::uint32_t>(input.count);
    of_cpu.residual = input.residual;
    return run_launch(*session_, [&] { return cpu_->launch(of_cpu, out, kernel_mode(mode)); });
  }

  kernels::CombineCpu& cpu() { return *cpu_; }

 private:
  std::shared_ptr<Session::Impl>
      session_;  ///< keeps the segment mapped while blocks may look at it
  OperatorMemory memory_;
  client::AtHome<kernels::CombineCpu> cpu_;  ///< goes first: its blocks use the memory above
};

Result<GemmCombine> GemmCombine::create(Session& session, const Shape& shape) {
  return create(session, shape, {});
}

Result<GemmCombine> GemmCombine::create(Session& session, const Shape& shape,
                                        const Tuning& tuning) {
  MK_RETURN_IF_ERROR(refuse_batch_invariance(kOp, tuning));
  MK_ASSIGN_OR_RETURN(const auto plan, plan_of(session, shape, tuning));
  kernels::CombineCpuOptions cpu_options{kernel_options(tuning, session.options().lanes)};
  MK_ASSIGN_OR_RETURN(cpu_options.b_layout, checked_layout(kOp, shape.b_layout));
  cpu_options.count_nonfinite = tuning.count_nonfinite;
  MK_ASSIGN_OR_RETURN(auto memory,
                      OperatorMemory::create(*session.impl(), kOp, describe(plan),
                                             plan.workspace_bytes(), plan.flag_count()));
  MK_ASSIGN_OR_RETURN(auto cpu, kernels::CombineCpu::create(plan, memory.context(), cpu_options));
  return GemmCombine(std::make_unique<Impl>(session.impl(), std::move(memory), std::move(cpu)));
}

Result<std::uint64_t> GemmCombine::workspace_bytes(const Session& session, const Shape& shape,
                                                   const Tuning& tuning) {
  MK_ASSIGN_OR_RETURN(const auto plan, plan_of(session, shape, tuning));
  return plan.workspace_bytes();
}
Result<std::uint64_t> GemmCombine::workspace_bytes(const Session& session, const Shape& shape) {
  return workspace_bytes(session, shape, {});
}

GemmCombine::GemmCombine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
GemmCombine::GemmCombine(GemmCombine&&) noexcept = default;
GemmCombine& GemmCombine::operator=(GemmCombine&&) noexcept = default;
GemmCombine::~GemmCombine() = default;

Result<LaunchStats> GemmCombine::launch(const Input& input, void* out, LaunchMode mode) {
  return impl_->launch(input, out, mode);
}
std::uint32_t GemmCombine::first_expert() const { return impl_->cpu().experts().first; }
std::uint32_t GemmCombine::expert_count() const { return impl_->cpu().experts().count; }
void GemmCombine::set_trace(bool on) { mk::set_trace(impl_->cpu().runner(), on); }
std::vector<TraceSpan> GemmCombine::trace() const { return trace_of(impl_->cpu().runner()); }

}  // namespace mk
