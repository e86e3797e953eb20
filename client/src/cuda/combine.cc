#include "client/src/cuda/gemm.h"
#include "kernels/ops/combine/sm90.h"
#include "kernels/ops/combine/spec.h"

namespace mk {
namespace {

constexpr const char* kOp = "combine";

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
    for (const auto& [name, memory] : all) MK_RETURN_IF_ERROR(check_on_gpu(kOp, name, memory));
    return cuda().launch(stream, input, out, mode);
  }
  kernels::ShardRange experts() const override { return cuda().experts(); }
};

Result<kernels::CombinePlan> plan_of(const Session::Impl& session, const DeviceCombineShape& shape,
                                     const Tuning& tuning) {
  const AttachOptions& options = session.options();
  auto tiling = kernels::combine_cuda_tiling();
  tiling.chunk_bytes = tuning.chunk_bytes;
  return kernels::CombinePlan::make(options.nodes, options.local_size, shape.shape, shape.dtype,
                                    tiling, kernels::combine_cuda_steps(options.nodes));
}

}  // namespace

Result<std::uint64_t> device_workspace_combine(Session::Impl& session,
                                               const DeviceCombineShape& shape,
                                               const Tuning& tuning) {
  MK_RETURN_IF_ERROR(expected_share(session));  // a GPU is there
  MK_ASSIGN_OR_RETURN(const auto plan, plan_of(session, shape, tuning));
  return plan.workspace_bytes();
}

Result<std::unique_ptr<DeviceCombine>> make_device_combine(Session::Impl& session,
                                                           const DeviceCombineShape& shape,
                                                           const Tuning& tuning) {
  MK_ASSIGN_OR_RETURN(const DeviceShare share, share_device(session));
  MK_ASSIGN_OR_RETURN(const auto plan, plan_of(session, shape, tuning));
  MK_ASSIGN_OR_RETURN(auto options, own_options(session, share, tuning));
  options.b_layout = shape.b_layout;
  return make_device_operator<Combine>(session, kOp, describe_plan(plan), plan.workspace_bytes(),
                                       plan.flag_count(), [&](const OperatorMemory& memory) {
                                         return kernels::CombineCuda::create(plan, memory.context(),
                                                                             options);
                                       });
}

}  // namespace mk
