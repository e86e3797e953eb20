#include <atomic>

#include "client/src/cuda/planned_by_job.h"
#include "kernels/cuda/host/planned.h"
#include "kernels/ops/moe/sm90.h"
#include "kernels/ops/moe/spec.h"

namespace mk {
namespace {

constexpr const char* kName = "moe-dispatch";

class Moe final : public CudaOperator<DeviceMoe, kernels::MoeDispatchCuda> {
 public:
  using CudaOperator::CudaOperator;
  Status launch(CudaStream stream, const kernels::MoeDispatchInput& input, void* y,
                std::uint64_t capacity, kernels::Mode mode) override {
    const std::pair<const char*, const void*> all[] = {
        {"tokens", input.tokens},   {"ids", input.ids},
        {"weights", input.weights}, {"expert_weights", input.expert_weights},
        {"bias", input.bias},       {"y", y}};
    for (const auto& [name, memory] : all) MK_RETURN_IF_ERROR(check_on_gpu(kName, name, memory));
    // More room than the operator can fill is of no harm.
    const std::uint64_t room = std::min<std::uint64_t>(capacity, cuda().plan().shape.rows_max);
    return cuda().launch(stream, input, y, static_cast<std::uint32_t>(room), mode);
  }
  kernels::ShardRange experts() const override { return cuda().experts(); }
  std::span<const std::uint32_t> expert_offsets() const override {
    shown_ = true;
    return {cuda().output().offsets, experts().count + std::size_t{1}};
  }
  std::span<const kernels::MoeRow> rows() const override {
    shown_ = true;
    return {cuda().output().rows, cuda().rows()};
  }

 private:
  bool leaves_nothing(bool launched) const override { return !launched && !shown_; }

  mutable std::atomic<bool> shown_ = false;  ///< its caller knows addresses in the workspace
};

struct MoeOnGpu {
  static constexpr const char* kOp = kName;
  using Device = DeviceMoe;
  using Operator = Moe;
  using Cuda = kernels::MoeDispatchCuda;

  static kernels::Shape extents(const AttachOptions& options, const DeviceMoeShape& shape) {
    return {shape.shape.tokens_max * options.world, shape.shape.weight_columns(),
            shape.shape.hidden};
  }
  static Result<kernels::MoeDispatchPlan> plan(const AttachOptions& options,
                                               const DeviceMoeShape& shape,
                                               std::uint32_t chunk_bytes, std::uint32_t blocks,
                                               const kernels::plan::JobPlan& job,
                                               const kernels::CudaOptions& all) {
    auto tiling = kernels::moe_dispatch_cuda_tiling();
    tiling.chunk_bytes = chunk_bytes;
    MK_ASSIGN_OR_RETURN(const kernels::MoeDispatchWay way,
                        kernels::cuda::planned_moe_way(options.nodes, options.local_size,
                                                       shape.shape, shape.dtype, blocks, job, all));
    return kernels::MoeDispatchPlan::make(options.nodes, options.local_size, shape.shape,
                                          shape.dtype, tiling, way);
  }
};

}  // namespace

Result<std::uint64_t> device_workspace_moe(Session::Impl& session, const DeviceMoeShape& shape,
                                           const Tuning& tuning) {
  return device_workspace_by_job<MoeOnGpu>(session, shape, tuning);
}

Result<std::unique_ptr<DeviceMoe>> make_device_moe(Session::Impl& session,
                                                   const DeviceMoeShape& shape,
                                                   const Tuning& tuning) {
  return make_device_by_job<MoeOnGpu>(session, shape, tuning);
}

}  // namespace mk
