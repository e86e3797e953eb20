#include "client/src/cuda/gemm.h"
#include "kernels/ops/ag_gemm/sm90.h"
#include "kernels/ops/ag_gemm/spec.h"

namespace mk {
namespace {

constexpr const char* kOp = "ag-gemm";

class AgGemm final : public CudaGemm<kernels::AgGemmCuda> {
 public:
  using CudaGemm::CudaGemm;
  void* input() const override { return cuda().input(); }

 private:
  Status launch_checked(CudaStream stream, const DeviceArguments& arguments, std::uint32_t m,
                        kernels::Mode mode) override {
    return cuda().launch(stream, arguments.a, arguments.lda, arguments.b, arguments.ldb,
                         arguments.c, arguments.ldc, m, mode, arguments.gathered, arguments.bias);
  }
};

Result<kernels::AgGemmPlan> plan_of(const Session::Impl& session, const DeviceShape& shape,
                                    const Tuning& tuning, const DeviceShare& share,
                                    const AgreedPlan& agreed) {
  const AttachOptions& options = session.options();
  MK_ASSIGN_OR_RETURN(const kernels::Tiling tiling, tiling_for(kernels::plan::Op::kAgGemm, session,
                                                               shape, tuning, share, agreed));
  return kernels::AgGemmPlan::make(options.nodes, options.local_size, shape.shape, shape.dtype,
                                   tiling, shape.result.epilogue);
}

}  // namespace

Result<std::uint64_t> device_workspace_ag_gemm(Session::Impl& session, const DeviceShape& shape,
                                               const Tuning& tuning) {
  MK_ASSIGN_OR_RETURN(const DeviceShare share, expected_share(session));
  MK_ASSIGN_OR_RETURN(const AgreedPlan agreed, expected_device_plan(session, shape, tuning));
  MK_ASSIGN_OR_RETURN(const auto plan, plan_of(session, shape, tuning, share, agreed));
  return plan.workspace_bytes;
}

Result<std::unique_ptr<DeviceGemm>> make_device_ag_gemm(Session::Impl& session,
                                                        const DeviceShape& shape,
                                                        const Tuning& tuning) {
  MK_ASSIGN_OR_RETURN(const DeviceShare share, share_device(session));
  MK_ASSIGN_OR_RETURN(const AgreedPlan agreed, agree_device_plan(session, shape, tuning));
  MK_ASSIGN_OR_RETURN(const auto plan, plan_of(session, shape, tuning, share, agreed));
  return make_device_operator<AgGemm>(
      session, kOp, describe_plan(plan), plan.workspace_bytes, plan.flag_count(),
      [&](const OperatorMemory& memory) {
        return kernels::AgGemmCuda::create(plan, memory.context(),
                                           gemm_options(share, agreed, shape, tuning));
      },
      kOp, shape);
}

}  // namespace mk
