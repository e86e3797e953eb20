#include <memory>
#include <utility>

#include "client/src/cuda/planned_by_job.h"
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

struct RingOnGpu {
  static constexpr const char* kOp = kName;
  using Device = DeviceRing;
  using Operator = Ring;
  using Cuda = kernels::RingAttentionCuda;

  static kernels::Shape extents(const AttachOptions&, const kernels::RingAttentionShape& shape) {
    return {static_cast<std::uint32_t>(shape.seq_max), shape.query_heads, shape.head_dim};
  }
  static Result<kernels::RingAttentionPlan> plan(const AttachOptions& options,
                                                 const kernels::RingAttentionShape& shape,
                                                 std::uint32_t chunk_bytes, std::uint32_t blocks,
                                                 const kernels::plan::JobPlan& job,
                                                 const kernels::CudaOptions& all) {
    MK_ASSIGN_OR_RETURN(const kernels::RingAttentionTiling tiling,
                        kernels::cuda::planned_ring_tiling(options.nodes, options.local_size, shape,
                                                           chunk_bytes, blocks, job, all));
    return kernels::RingAttentionPlan::make(options.nodes, options.local_size, shape, tiling);
  }
};

}  // namespace

Result<std::uint64_t> device_workspace_ring(Session::Impl& session,
                                            const kernels::RingAttentionShape& shape,
                                            const Tuning& tuning) {
  return device_workspace_by_job<RingOnGpu>(session, shape, tuning);
}

Result<std::unique_ptr<DeviceRing>> make_device_ring(Session::Impl& session,
                                                     const kernels::RingAttentionShape& shape,
                                                     const Tuning& tuning) {
  return make_device_by_job<RingOnGpu>(session, shape, tuning);
}

}  // namespace mk
