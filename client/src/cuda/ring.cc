#include <memory>
#include <optional>
#include <utility>

#include "client/src/cuda/own_plan.h"
#include "kernels/cuda/host/planned.h"
#include "kernels/ops/ring/sm90.h"
#include "kernels/ops/ring/spec.h"

namespace mk {
namespace {

constexpr const char* kName = "ring";

kernels::cuda::AttentionTensor tensor_of(const void* data, const kernels::RingStrides& strides) {
  kernels::cuda::AttentionTensor tensor;
  tensor.data = const_cast<void*>(data);  // only the output's is written
  tensor.batch_stride = static_cast<std::int64_t>(strides.batch);
  tensor.row_stride = static_cast<std::int64_t>(strides.row);
  tensor.head_stride = static_cast<std::int64_t>(strides.head);
  return tensor;
}

class Ring final : public CudaOperator<DeviceRing, kernels::RingAttentionCuda> {
 public:
  using CudaOperator::CudaOperator;
  Status launch(CudaStream stream, const kernels::RingAttentionTensors& given, std::uint64_t seq,
                kernels::Mode mode) override {
    MK_ASSIGN_OR_RETURN(const std::uint32_t rows, cuda().rows_of_tensors(given, seq));
    MK_ASSIGN_OR_RETURN(const auto tensors, checked_tensors(cuda().plan(), given, rows));
    const std::pair<const char*, const void*> all[] = {
        {"q", tensors.q},     {"k", tensors.k},     {"v", tensors.v},
        {"out", tensors.out}, {"lse", tensors.lse}, {"sequence_starts", tensors.starts}};
    for (const auto& [name, memory] : all) MK_RETURN_IF_ERROR(check_on_gpu(kName, name, memory));
    kernels::RingAttentionDeviceTensors on_device;
    on_device.q = tensor_of(tensors.q, tensors.q_strides);
    on_device.k = tensor_of(tensors.k, tensors.k_strides);
    on_device.v = tensor_of(tensors.v, tensors.v_strides);
    on_device.o = tensor_of(tensors.out, tensors.out_strides);
    on_device.lse = tensors.lse;
    on_device.lse_batch_stride = static_cast<std::int64_t>(tensors.lse_strides.batch);
    on_device.lse_row_stride = static_cast<std::int64_t>(tensors.lse_strides.row);
    on_device.lse_head_stride = static_cast<std::int64_t>(tensors.lse_strides.head);
    on_device.scale = static_cast<float>(tensors.scale);
    on_device.starts = tensors.starts;
    on_device.sequences = tensors.sequences;
    on_device.room = rows;
    return cuda().launch(stream, on_device, seq, mode);
  }
  void set_trace(bool on) override {
    CudaOperator::set_trace(on);
    cuda().set_trace(on);
  }
  std::vector<kernels::TraceEvent> trace() const override { return cuda().trace(); }
};

/// The rank's own, of CudaOptions::dma.
Result<std::optional<bool>> transport_of(const Tuning& tuning) {
  switch (tuning.transport) {
    case Transport::kAuto:
      return std::nullopt;
    case Transport::kEngines:
      return true;
    case Transport::kWarpgroups:
      return false;
  }
  return fail(ErrorCode::kInvalidArgument,
              "{}: there is no transport {}; 0 is chosen, 1 copy engines, 2 warpgroups", kName,
              static_cast<int>(tuning.transport));
}

/// As all ranks make it, by what they agree on.
Result<kernels::RingAttentionPlan> plan_of(const Session::Impl& session,
                                           const kernels::RingAttentionShape& shape,
                                           const Tuning& tuning, const DeviceShare& share,
                                           const AgreedPlan& agreed) {
  const AttachOptions& options = session.options();
  kernels::CudaOptions all;
  all.ranks_per_device = share.most_ranks;
  MK_ASSIGN_OR_RETURN(all.dma, transport_of(tuning));
  MK_ASSIGN_OR_RETURN(kernels::RingAttentionTiling tiling,
                      kernels::cuda::planned_ring_tiling(options.nodes, options.local_size, shape,
                                                         share.blocks, *agreed.job, all));
  tiling.chunk_bytes = tuning.chunk_bytes;
  return kernels::RingAttentionPlan::make(options.nodes, options.local_size, shape, tiling);
}

kernels::Shape extents_of(const kernels::RingAttentionShape& shape) {
  return {static_cast<std::uint32_t>(shape.seq_max), shape.query_heads, shape.head_dim};
}

}  // namespace

Result<std::uint64_t> device_workspace_ring(Session::Impl& session,
                                            const kernels::RingAttentionShape& shape,
                                            const Tuning& tuning) {
  MK_ASSIGN_OR_RETURN(const DeviceShare share, expected_share(session));
  MK_ASSIGN_OR_RETURN(const AgreedPlan agreed,
                      expected_device_plan(session, extents_of(shape), tuning));
  MK_ASSIGN_OR_RETURN(const auto plan, plan_of(session, shape, tuning, share, agreed));
  return plan.workspace_bytes;
}

Result<std::unique_ptr<DeviceRing>> make_device_ring(Session::Impl& session,
                                                     const kernels::RingAttentionShape& shape,
                                                     const Tuning& tuning) {
  MK_ASSIGN_OR_RETURN(const DeviceShare share, share_device(session));
  MK_ASSIGN_OR_RETURN(const AgreedPlan agreed,
                      agree_device_plan(session, extents_of(shape), tuning));
  MK_ASSIGN_OR_RETURN(const auto plan, plan_of(session, shape, tuning, share, agreed));
  kernels::CudaOptions options = cuda_options(share, tuning);
  options.job_plan = agreed.job;
  MK_ASSIGN_OR_RETURN(options.dma, transport_of(tuning));
  // A caller that names SMs for it wants them to share, unless copy engines are named, too.
  if (tuning.share_sms != 0 && !options.dma) options.dma = false;
  // Ranks whose node has nobody else bring nothing.
  if (!plan.engines && options.dma == true) options.dma.reset();
  return make_device_operator<Ring>(
      session, kName, DeviceMemoryNeeds::of(plan, tuning),
      moved_plan_maker(plan, [options](const auto& moved, const kernels::RankContext& context) {
        return kernels::RingAttentionCuda::create(moved, context, options);
      }));
}

}  // namespace mk
