/// \file
/// Public Ring Attention API: agrees with the other ranks on the plan, gives the executor its
/// memory, translates arguments.

#include "mkernel/ring_attention.h"

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "client/src/executor_operator.h"
#include "kernels/ops/ring/cpu.h"
#include "kernels/ops/ring/spec.h"

namespace mk {
namespace {

constexpr std::string_view kOp = "ring";

Result<kernels::RingAttentionShape> checked_shape(const RingAttention::Shape& shape) {
  MK_ASSIGN_OR_RETURN(const auto dtype, checked_dtype(kOp, shape.dtype));
  return kernels::RingAttentionShape{shape.seq_max,  shape.query_heads,  shape.key_heads,
                                     shape.head_dim, shape.causal,       dtype,
                                     shape.batch,    shape.sequences_max};
}

/// A kernel has its own tiles, and takes all keys of an item at one time.
Status check_for_device(const RingAttention::Tuning& tuning) {
  if (tuning.tile_m == 0 && tuning.tile_n == 0 && tuning.remote_passes == 0) return {};
  return fail(ErrorCode::kUnsupported,
              "{}: tiles of {} queries and {} keys and {} remote passes were asked for; on a GPU "
              "the kernel has its own: leave tile_m, tile_n and remote_passes 0",
              kOp, tuning.tile_m, tuning.tile_n, tuning.remote_passes);
}

kernels::RingAttentionTensors tensors_of(const RingAttention::Input& in,
                                         const RingAttention::Output& out) {
  kernels::RingAttentionTensors tensors;
  tensors.q = in.q;
  tensors.k = in.k;
  tensors.v = in.v;
  tensors.out = out.out;
  tensors.lse = out.lse;
  tensors.q_strides = {in.q_stride, in.q_head_stride, in.q_batch_stride};
  tensors.k_strides = {in.k_stride, in.k_head_stride, in.k_batch_stride};
  tensors.v_strides = {in.v_stride, in.v_head_stride, in.v_batch_stride};
  tensors.out_strides = {out.out_stride, out.out_head_stride, out.out_batch_stride};
  tensors.lse_strides = {out.lse_stride, out.lse_head_stride, out.lse_batch_stride};
  tensors.scale = in.scale;
  tensors.starts = in.sequence_starts;
  tensors.sequences = in.sequences;
  tensors.room = in.rows;
  return tensors;
}

struct RingKind {
  static constexpr std::string_view kName = kOp;
  static constexpr bool kAdapts = true;
  static constexpr bool kAlone = false;
  using Shape = RingAttention::Shape;
  using Tuning = RingAttention::Tuning;
  using Checked = kernels::RingAttentionShape;
  using Plan = kernels::RingAttentionPlan;
  using Cpu = kernels::RingAttentionCpu;
  using Device = DeviceRing;
  static constexpr auto checked = &checked_shape;
  static constexpr auto device_bytes = &device_workspace_ring;
  static constexpr auto make_device = &make_device_ring;

  static Status check_tuning(const Tuning& tuning, bool on_device) {
    return on_device ? check_for_device(tuning) : Status{};
  }
  static Result<Plan> cpu_plan(const AttachOptions& options, const Checked& shape,
                               const Tuning& tuning) {
    kernels::RingAttentionTiling tiling;
    tiling.tile_q = tuning.tile_m;
    tiling.tile_k = tuning.tile_n;
    tiling.chunk_bytes = tuning.chunk_bytes;
    tiling.remote_passes = tuning.remote_passes;
    return Plan::make(options.nodes, options.local_size, shape, tiling);
  }
  static Result<std::unique_ptr<Cpu>> make_cpu(const Plan& plan, const Checked&,
                                               const kernels::RankContext& context,
                                               const kernels::CpuOptions& own, const Tuning&) {
    return Cpu::create(plan, context, own);
  }
};

}  // namespace

class __attribute__((visibility("hidden"))) RingAttention::Impl : public Operator<RingKind> {
 public:
  using Operator::make;
  using Operator::Operator;

  Result<LaunchStats> launch(const Input& input, const Output& output, std::uint64_t seq,
                             LaunchOptions options) {
    const auto tensors = tensors_of(input, output);
    const kernels::Mode mode = kernel_mode(options.mode);
    return run(
        options, [&](CudaStream stream) { return device()->launch(stream, tensors, seq, mode); },
        [&] { return cpu().launch(tensors, seq, mode); });
  }
  Status launch_on(CudaStream stream, const Input& input, const Output& output, std::uint64_t seq,
                   LaunchOptions options) {
    return put(options, [&] {
      return device()->launch(stream, tensors_of(input, output), seq, kernel_mode(options.mode));
    });
  }
};

Result<RingAttention> RingAttention::create(Session& session, const Shape& shape) {
  return create(session, shape, {});
}

Result<RingAttention> RingAttention::create(Session& session, const Shape& shape,
                                            const Tuning& tuning) {
  MK_ASSIGN_OR_RETURN(auto made, Impl::make<Impl>(session, shape, tuning));
  return RingAttention(std::move(made));
}

Result<std::uint64_t> RingAttention::workspace_bytes(const Session& session, const Shape& shape,
                                                     const Tuning& tuning) {
  return Impl::workspace_bytes(session, shape, tuning);
}
Result<std::uint64_t> RingAttention::workspace_bytes(const Session& session, const Shape& shape) {
  return workspace_bytes(session, shape, {});
}

RingAttention::RingAttention(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
RingAttention::RingAttention(RingAttention&&) noexcept = default;
RingAttention& RingAttention::operator=(RingAttention&&) noexcept = default;
RingAttention::~RingAttention() = default;

Result<LaunchStats> RingAttention::launch(const Input& input, const Output& output,
                                          std::uint64_t seq, LaunchOptions options) {
  return impl_->launch(input, output, seq, options);
}
Status RingAttention::launch_on(CudaStream stream, const Input& input, const Output& output,
                                std::uint64_t seq, LaunchOptions options) {
  return impl_->launch_on(stream, input, output, seq, options);
}
Status RingAttention::status() const { return impl_->status(); }
Result<LaunchStats> RingAttention::finish(CudaStream stream) { return impl_->finish(stream); }
void RingAttention::set_trace(bool on) { impl_->set_trace(on); }
std::vector<TraceSpan> RingAttention::trace() const { return impl_->trace(); }

}  // namespace mk
