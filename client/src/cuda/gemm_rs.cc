#include "client/src/cuda/gemm.h"
#include "kernels/ops/gemm_rs/sm90.h"
#include "kernels/ops/gemm_rs/spec.h"

namespace mk {
namespace {

constexpr const char* kOp = "gemm-rs";

class GemmRs final : public CudaGemm<kernels::GemmRsCuda> {
 public:
  using CudaGemm::CudaGemm;

 private:
  Status launch_checked(CudaStream stream, const DeviceArguments& arguments, std::uint32_t m,
                        kernels::Mode mode) override {
    return cuda().launch(stream, arguments.a, arguments.lda, arguments.b, arguments.ldb,
                         arguments.c, arguments.ldc, m, mode, arguments.bias);
  }
};

Result<kernels::GemmRsPlan> plan_of(const Session::Impl& session, const DeviceShape& shape,
                                    const Tuning& tuning, const DeviceShare& share,
                                    const AgreedPlan& agreed) {
  const AttachOptions& options = session.options();
  MK_ASSIGN_OR_RETURN(const kernels::Tiling tiling, tiling_for(kernels::plan::Op::kGemmRs, session,
                                                               shape, tuning, share, agreed));
  return kernels::GemmRsPlan::make(options.nodes, options.local_size, shape.shape, shape.dtype,
                                   tiling, shape.result);
}

}  // namespace

Result<std::uint64_t> device_workspace_gemm_rs(Session::Impl& session, const DeviceShape& shape,
                                               const Tuning& tuning) {
  MK_ASSIGN_OR_RETURN(const DeviceShare share, expected_share(session));
  MK_ASSIGN_OR_RETURN(const AgreedPlan agreed, expected_device_plan(session, shape, tuning));
  MK_ASSIGN_OR_RETURN(const auto plan, plan_of(session, shape, tuning, share, agreed));
  return plan.workspace_bytes();
}

Result<std::unique_ptr<DeviceGemm>> make_device_gemm_rs(Session::Impl& session,
                                                        const DeviceShape& shape,
                                                        const Tuning& tuning) {
  MK_ASSIGN_OR_RETURN(const DeviceShare share, share_device(session));
  MK_ASSIGN_OR_RETURN(const AgreedPlan agreed, agree_device_plan(session, shape, tuning));
  MK_ASSIGN_OR_RETURN(const auto plan, plan_of(session, shape, tuning, share, agreed));
  return make_device_operator<GemmRs>(
      session, kOp, describe_plan(plan), plan.workspace_bytes(), plan.flag_count(),
      [&](const OperatorMemory& memory) {
        return kernels::GemmRsCuda::create(plan, shape.shape.k, memory.context(),
                                           gemm_options(share, agreed, shape, tuning));
      },
      kOp, shape);
}

}  // namespace mk
