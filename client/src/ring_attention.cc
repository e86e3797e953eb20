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

struct RingKind {
  static constexpr std::string_view kName = "ring";
};
constexpr std::string_view kOp = RingKind::kName;

Result<kernels::RingAttentionShape> checked_shape(const RingAttention::Shape& shape) {
  MK_ASSIGN_OR_RETURN(const auto dtype, checked_dtype(kOp, shape.dtype));
  return kernels::RingAttentionShape{shape.seq_max,  shape.query_heads,  shape.key_heads,
                                     shape.head_dim, shape.causal,       dtype,
                                     shape.batch,    shape.sequences_max};
}

Result<kernels::RingAttentionPlan> cpu_plan(const AttachOptions& options,
                                            const kernels::RingAttentionShape& shape,
                                            const RingAttention::Tuning& tuning) {
  kernels::RingAttentionTiling tiling;
  tiling.tile_q = tuning.tile_m;
  tiling.tile_k = tuning.tile_n;
  tiling.chunk_bytes = tuning.chunk_bytes;
  tiling.remote_passes = tuning.remote_passes;
  return kernels::RingAttentionPlan::make(options.nodes, options.local_size, shape, tiling);
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

}  // namespace

class __attribute__((visibility("hidden"))) RingAttention::Impl
    : public ExecutorOperator<RingKind, kernels::RingAttentionCpu, DeviceRing> {
 public:
  static Result<std::unique_ptr<Impl>> create(Session& session, const Shape& shape,
                                              const Tuning& tuning) {
    MK_ASSIGN_OR_RETURN(const auto checked, checked_shape(shape));
    MK_ASSIGN_OR_RETURN(const bool on_device, wants_device(kOp, tuning.executor));
    MK_RETURN_IF_ERROR(check_partition(kOp, tuning, on_device));
    std::optional<kernels::RingAttentionPlan> plan;
    kernels::CpuOptions own;
    if (on_device) {
      MK_RETURN_IF_ERROR(check_for_device(tuning));
    } else {
      MK_ASSIGN_OR_RETURN(plan, cpu_plan(session.options(), checked, tuning));
      MK_ASSIGN_OR_RETURN(own, kernel_options(tuning, *session.impl()));
    }
    std::unique_ptr<Impl> made(new Impl(session.impl()));
    MK_RETURN_IF_ERROR(made->find_or_make_core(
        plan, false,
        [&](const kernels::RankContext& context) {
          return kernels::RingAttentionCpu::create(*plan, context, own);
        },
        [&] { return make_device_ring(*session.impl(), checked, tuning); }, tuning, shape));
    return made;
  }

  Result<LaunchStats> launch(const Input& input, const Output& output, std::uint64_t seq,
                             LaunchOptions options) {
    const auto tensors = tensors_of(input, output);
    if (device() != nullptr) {
      return run_on_device(kOp, *session_, *device(), [&](CudaStream stream) {
        device()->set_tag(options.tag);
        return device()->launch(stream, tensors, seq, kernel_mode(options.mode));
      });
    }
    return core().note(run_launch(*session_, [&] {
      cpu().runner().set_tag(options.tag);
      return cpu().launch(tensors, seq, kernel_mode(options.mode));
    }));
  }
  Status launch_on(CudaStream stream, const Input& input, const Output& output, std::uint64_t seq,
                   LaunchOptions options) {
    return launch_on_device(kOp, *session_, device(), [&] {
      device()->set_tag(options.tag);
      return device()->launch(stream, tensors_of(input, output), seq, kernel_mode(options.mode));
    });
  }

 private:
  using ExecutorOperator::ExecutorOperator;
};

Result<RingAttention> RingAttention::create(Session& session, const Shape& shape) {
  return create(session, shape, {});
}

Result<RingAttention> RingAttention::create(Session& session, const Shape& shape,
                                            const Tuning& tuning) {
  MK_ASSIGN_OR_RETURN(auto made, Impl::create(session, shape, tuning));
  return RingAttention(std::move(made));
}

Result<std::uint64_t> RingAttention::workspace_bytes(const Session& session, const Shape& shape,
                                                     const Tuning& tuning) {
  MK_ASSIGN_OR_RETURN(const auto checked, checked_shape(shape));
  MK_ASSIGN_OR_RETURN(const bool on_device, wants_device(kOp, tuning.executor));
  if (on_device) {
    MK_RETURN_IF_ERROR(check_for_device(tuning));
    return device_workspace_ring(*session.impl(), checked, tuning);
  }
  MK_ASSIGN_OR_RETURN(const auto plan, cpu_plan(session.options(), checked, tuning));
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
