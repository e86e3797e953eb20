#include "client/src/cuda/cuda_operator.h"
#include "kernels/cuda/gemm_ar/gemm_ar_cuda.h"
#include "kernels/gemm_ar/plan.h"

namespace mk {
namespace {

class GemmAr final : public CudaOperator<kernels::GemmArCuda> {
 public:
  using CudaOperator::CudaOperator;
  Status launch(CudaStream stream, const DeviceArguments& arguments, std::uint32_t m,
                kernels::Mode mode) override {
    return cuda().launch(stream, arguments.a, lda(), arguments.b, ldb(), arguments.c, ldc(), m,
                         mode);
  }
  const void* output() const override { return cuda().output(); }
};

}  // namespace

Result<std::unique_ptr<DeviceOperator>> make_device_gemm_ar(Session::Impl& session,
                                                            const DeviceShape& shape,
                                                            const Tuning& tuning) {
  const AttachOptions& options = session.options();
  MK_ASSIGN_OR_RETURN(const DeviceShare share, share_device(session));
  MK_ASSIGN_OR_RETURN(
      const auto plan,
      kernels::GemmArPlan::make(
          options.nodes, options.local_size, shape.shape, shape.dtype,
          tiling_for(kernels::gemm_ar_cuda_tiling(options.nodes, shape.shape, share.blocks),
                     tuning)));
  return make_device_operator<GemmAr>(
      session, "gemm-ar", describe_plan(plan), plan.workspace_bytes(), plan.flag_count(), shape,
      [&](const OperatorMemory& memory) {
        return kernels::GemmArCuda::create(plan, shape.shape.k, memory.context(),
                                           cuda_options(share, shape, tuning));
      });
}

}  // namespace mk
