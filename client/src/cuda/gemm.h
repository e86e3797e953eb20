/// \file
/// What the three products over all ranks have in common on a GPU: tiles, options, matrices.
#pragma once

#include <memory>
#include <utility>

#include "client/src/cuda/cuda_operator.h"
#include "client/src/job_plan.h"
#include "kernels/plan/candidate.h"

namespace mk {

/// What this rank's operators that are no products are planned by, which need not agree.
Result<kernels::CudaOptions> own_options(Session::Impl& session, const DeviceShare& share,
                                         const Tuning& tuning);
/// What all ranks plan a product by: collective.
Result<AgreedPlan> agree_device_plan(Session::Impl& session, const DeviceShape& shape,
                                     const Tuning& tuning);
/// What that would answer, by what is known here: not collective.
Result<AgreedPlan> expected_device_plan(Session::Impl& session, const DeviceShape& shape,
                                        const Tuning& tuning);
/// The tiles, chunks and banks on which all ranks agree, but for what the caller chose.
Result<kernels::Tiling> tiling_for(kernels::plan::Op op, const Session::Impl& session,
                                   const DeviceShape& shape, const Tuning& tuning,
                                   const DeviceShare& share, const AgreedPlan& agreed);

inline kernels::CudaOptions gemm_options(const DeviceShare& share, const AgreedPlan& agreed,
                                         const DeviceShape& shape, const Tuning& tuning) {
  kernels::CudaOptions options = cuda_options(share, tuning);
  options.b_layout = shape.b_layout;
  options.job_plan = agreed.job;
  options.rates = {};  // rank 0's are in the plan
  return options;
}

/// `Cuda`: the operator in kernels/.
template <class Cuda>
class CudaGemm : public CudaOperator<DeviceGemm, Cuda> {
 public:
  CudaGemm(OperatorMemory memory, std::unique_ptr<Cuda> cuda, CudaStream stream, const char* op,
           const DeviceShape& shape)
      : CudaOperator<DeviceGemm, Cuda>(std::move(memory), std::move(cuda), stream),
        op_(op),
        shape_(shape) {}

  Status launch(CudaStream stream, const DeviceArguments& arguments, std::uint32_t m,
                kernels::Mode mode) final {
    MK_RETURN_IF_ERROR(check_on_gpu(op_, "a", arguments.a));
    MK_RETURN_IF_ERROR(check_on_gpu(op_, "b", arguments.b));
    MK_RETURN_IF_ERROR(check_on_gpu(op_, "c", arguments.c));
    MK_RETURN_IF_ERROR(check_on_gpu(op_, "gathered", arguments.gathered));
    MK_RETURN_IF_ERROR(check_on_gpu(op_, "bias", arguments.bias));
    return launch_checked(stream, arguments, m, mode);
  }

 protected:
  virtual Status launch_checked(CudaStream stream, const DeviceArguments& arguments,
                                std::uint32_t m, kernels::Mode mode) = 0;
  const DeviceShape& shape() const { return shape_; }

 private:
  const char* const op_;
  const DeviceShape shape_;
};

}  // namespace mk
