/// \file
/// Public Ring Attention API: agrees with the other ranks on the plan, gives the executor its
/// memory, translates arguments.

#include "mkernel/ring_attention.h"

#include <utility>

#include "client/src/operator_memory.h"
#include "client/src/operator_support.h"
#include "kernels/ops/ring/cpu.h"
#include "kernels/ops/ring/spec.h"

namespace mk {
namespace {

constexpr std::string_view kOp = "ring-attention";

/// What must be equal on all ranks, for people to compare.
std::string describe(const kernels::RingAttentionPlan& plan) {
  return fmt::format(
      "seq_max={} query_heads={} key_heads={} head_dim={} causal={} dtype={} tiles={}x{} "
      "chunk_bytes={} remote_passes={} banks={} plan={:016x}",
      plan.seq_max, plan.query_heads, plan.key_heads, plan.head_dim, plan.causal,
      kernels::name_of(plan.dtype), plan.tile_q, plan.tile_k, plan.gather.chunk_bytes,
      plan.remote_passes, plan.banks, plan.fingerprint());
}

Result<kernels::RingAttentionPlan> plan_of(const Session& session,
                                           const RingAttention::Shape& shape,
                                           const RingAttention::Tuning& tuning) {
  MK_RETURN_IF_ERROR(check_cpu_only(kOp, tuning.executor));
  MK_ASSIGN_OR_RETURN(const auto dtype, checked_dtype(kOp, shape.dtype));
  const AttachOptions& options = session.options();
  const kernels::RingAttentionShape kernel_shape{shape.seq_max,  shape.query_heads, shape.key_heads,
                                                 shape.head_dim, shape.causal,      dtype};
  kernels::RingAttentionTiling tiling;
  tiling.tile_q = tuning.tile_m;
  tiling.tile_k = tuning.tile_n;
  tiling.chunk_bytes = tuning.chunk_bytes;
  tiling.remote_passes = tuning.remote_passes;
  return kernels::RingAttentionPlan::make(options.nodes, options.local_size, kernel_shape, tiling);
}

}  // namespace

class __attribute__((visibility("hidden"))) RingAttention::Impl {
 public:
  Impl(std::shared_ptr<Session::Impl> session, OperatorMemory memory,
       std::unique_ptr<kernels::RingAttentionCpu> cpu)
      : session_(std::move(session)), memory_(std::move(memory)), cpu_(std::move(cpu)) {}

  Result<LaunchStats> launch(const Input& input, const Output& output, std::uint64_t seq,
                             LaunchMode mode) {
    kernels::RingAttentionTensors tensors;
    tensors.q = input.q;
    tensors.k = input.k;
    tensors.v = input.v;
    tensors.out = output.out;
    tensors.lse = output.lse;
    tensors.q_stride = input.q_stride;
    tensors.k_stride = input.k_stride;
    tensors.v_stride = input.v_stride;
    tensors.out_stride = output.out_stride;
    tensors.scale = input.scale;
    return run_launch(*session_, [&] { return cpu_->launch(tensors, seq, kernel_mode(mode)); });
  }

  kernels::LaunchRunner& runner() { return cpu_->runner(); }

 private:
  std::shared_ptr<Session::Impl>
      session_;  ///< keeps the segment mapped while blocks may look at it
  OperatorMemory memory_;
  client::AtHome<kernels::RingAttentionCpu> cpu_;  ///< goes first: its blocks use the memory above
};

Result<RingAttention> RingAttention::create(Session& session, const Shape& shape) {
  return create(session, shape, {});
}

Result<RingAttention> RingAttention::create(Session& session, const Shape& shape,
                                            const Tuning& tuning) {
  MK_ASSIGN_OR_RETURN(const auto plan, plan_of(session, shape, tuning));
  const AttachOptions& options = session.options();
  MK_ASSIGN_OR_RETURN(auto memory, OperatorMemory::create(*session.impl(), kOp, describe(plan),
                                                          plan.workspace_bytes, plan.flag_count()));
  MK_ASSIGN_OR_RETURN(auto cpu, kernels::RingAttentionCpu::create(
                                    plan, memory.context(), kernel_options(tuning, options.lanes)));
  return RingAttention(std::make_unique<Impl>(session.impl(), std::move(memory), std::move(cpu)));
}

Result<std::uint64_t> RingAttention::workspace_bytes(const Session& session, const Shape& shape,
                                                     const Tuning& tuning) {
  MK_ASSIGN_OR_RETURN(const auto plan, plan_of(session, shape, tuning));
  return plan.workspace_bytes;
}
Result<std::uint64_t> RingAttention::workspace_bytes(const Session& session, const Shape& shape) {
  return workspace_bytes(session, shape, {});
}

RingAttention::RingAttention(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
RingAttention::RingAttention(RingAttention&&) noexcept = default;
RingAttention& RingAttention::operator=(RingAttention&&) noexcept = default;
RingAttention::~RingAttention() = default;

Result<LaunchStats> RingAttention::launch(const Input& input, const Output& output,
                                          std::uint64_t seq, LaunchMode mode) {
  return impl_->launch(input, output, seq, mode);
}
void RingAttention::set_trace(bool on) { mk::set_trace(impl_->runner(), on); }
std::vector<TraceSpan> RingAttention::trace() const { return trace_of(impl_->runner()); }

}  // namespace mk
