#include "client/src/cuda/gemm.h"
#include "kernels/ops/moe/sm90.h"
#include "kernels/ops/moe/spec.h"

namespace mk {
namespace {

constexpr const char* kOp = "moe-dispatch";

class Moe final : public CudaOperator<DeviceMoe, kernels::MoeDispatchCuda> {
 public:
  using CudaOperator::CudaOperator;
  Status launch(CudaStream stream, const kernels::MoeDispatchInput& input, void* y,
                std::uint64_t capacity, kernels::Mode mode) override {
    const std::pair<const char*, const void*> all[] = {
        {"tokens", input.tokens},   {"ids", input.ids},
        {"weights", input.weights}, {"expert_weights", input.expert_weights},
        {"bias", input.bias},       {"y", y}};
    for (const auto& [name, memory] : all) MK_RETURN_IF_ERROR(check_on_gpu(kOp, name, memory));
    // More room than the operator can fill is of no harm.
    const std::uint64_t room = std::min<std::uint64_t>(capacity, cuda().plan().shape.rows_max);
    return cuda().launch(stream, input, y, static_cast<std::uint32_t>(room), mode);
  }
  kernels::ShardRange experts() const override { return cuda().experts(); }
  std::span<const std::uint32_t> expert_offsets() const override {
    return {cuda().output().offsets, experts().count + std::size_t{1}};
  }
  std::span<const kernels::MoeRow> rows() const override {
    return {cuda().output().rows, cuda().rows()};
  }
};

Result<kernels::MoeDispatchPlan> plan_of(const Session::Impl& session, const DeviceMoeShape& shape,
                                         const Tuning& tuning) {
  const AttachOptions& options = session.options();
  auto tiling = kernels::moe_dispatch_cuda_tiling();
  tiling.chunk_bytes = tuning.chunk_bytes;
  return kernels::MoeDispatchPlan::make(options.nodes, options.local_size, shape.shape, shape.dtype,
                                        tiling, kernels::moe_dispatch_cuda_way(options.nodes));
}

}  // namespace

Result<std::uint64_t> device_workspace_moe(Session::Impl& session, const DeviceMoeShape& shape,
                                           const Tuning& tuning) {
  MK_RETURN_IF_ERROR(expected_share(session));  // a GPU is there
  MK_ASSIGN_OR_RETURN(const auto plan, plan_of(session, shape, tuning));
  return plan.workspace_bytes();
}

Result<std::unique_ptr<DeviceMoe>> make_device_moe(Session::Impl& session,
                                                   const DeviceMoeShape& shape,
                                                   const Tuning& tuning) {
  MK_ASSIGN_OR_RETURN(const DeviceShare share, share_device(session));
  MK_ASSIGN_OR_RETURN(const auto plan, plan_of(session, shape, tuning));
  MK_ASSIGN_OR_RETURN(auto options, own_options(session, share, tuning));
  options.b_layout = shape.b_layout;
  return make_device_operator<Moe>(session, kOp, describe_plan(plan), plan.workspace_bytes(),
                                   plan.flag_count(), [&](const OperatorMemory& memory) {
                                     return kernels::MoeDispatchCuda::create(plan, memory.context(),
                                                                             options);
                                   });
}

}  // namespace mk
