#include "client/src/cuda/planned_by_shape.h"
#include "kernels/ops/combine/sm90.h"
#include "kernels/ops/combine/spec.h"

namespace mk {
namespace {

constexpr const char* kName = "combine";

class Combine final : public CudaOperator<DeviceCombine, kernels::CombineCuda> {
 public:
  using CudaOperator::CudaOperator;
  Status launch(CudaStream stream, const kernels::CombineDeviceInput& input, void* out,
                kernels::Mode mode) override {
    const std::pair<const char*, const void*> all[] = {{"y", input.y},
                                                       {"rows", input.rows},
                                                       {"expert_offsets", input.offsets},
                                                       {"expert_weights", input.expert_weights},
                                                       {"ids", input.ids},
                                                       {"residual", input.residual},
                                                       {"out", out}};
    for (const auto& [name, memory] : all) MK_RETURN_IF_ERROR(check_on_gpu(kName, name, memory));
    return cuda().launch(stream, input, out, mode);
  }
  kernels::ShardRange experts() const override { return cuda().experts(); }
};

struct CombineOnGpu {
  static constexpr const char* kOp = kName;
  using Device = DeviceCombine;
  using Operator = Combine;
  using Cuda = kernels::CombineCuda;

  static Result<kernels::CombinePlan> plan(const AttachOptions& options,
                                           const DeviceCombineShape& shape,
                                           std::uint32_t chunk_bytes) {
    auto tiling = kernels::combine_cuda_tiling();
    tiling.chunk_bytes = chunk_bytes;
    return kernels::CombinePlan::make(options.nodes, options.local_size, shape.shape, shape.dtype,
                                      tiling, kernels::combine_cuda_steps(options.nodes));
  }
};

}  // namespace

Result<std::uint64_t> device_workspace_combine(Session::Impl& session,
                                               const DeviceCombineShape& shape,
                                               const Tuning& tuning) {
  return device_workspace_by_shape<CombineOnGpu>(session, shape, tuning);
}

Result<std::unique_ptr<DeviceCombine>> make_device_combine(Session::Impl& session,
                                                           const DeviceCombineShape& shape,
                                                           const Tuning& tuning) {
  return make_device_by_shape<CombineOnGpu>(session, shape, tuning);
}

}  // namespace mk
