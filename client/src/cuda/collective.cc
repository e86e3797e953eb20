#include "client/src/cuda/cuda_operator.h"

namespace mk {
namespace {

class CudaCollective final : public CudaOperator<DeviceCollective, kernels::CollectiveCuda> {
 public:
  CudaCollective(OperatorWorkspace memory, Create create,
                 std::unique_ptr<kernels::CollectiveCuda> cuda, CudaStream stream,
                 std::string_view op)
      : CudaOperator(std::move(memory), std::move(create), std::move(cuda), stream), op_(op) {}

  Status launch(CudaStream stream, const void* input, void* output, std::uint32_t m,
                kernels::Mode mode) override {
    MK_RETURN_IF_ERROR(check_on_gpu(op_, "input", input));
    MK_RETURN_IF_ERROR(check_on_gpu(op_, "output", output));
    return cuda().launch(stream, input, output, m, mode);
  }
  void* input() const override { return cuda().input(); }

 private:
  const std::string op_;
};

}  // namespace

Status expect_device(Session::Impl& session) {
  MK_RETURN_IF_ERROR(expected_share(session));
  return {};
}

Result<std::unique_ptr<DeviceCollective>> make_device_collective(Session::Impl& session,
                                                                 const DeviceCollectivePlan& plan,
                                                                 const Tuning& tuning) {
  MK_ASSIGN_OR_RETURN(const DeviceShare share, share_device(session));
  const kernels::CudaOptions options = cuda_options(share, tuning);
  return make_device_operator<CudaCollective>(
      session, plan.op,
      DeviceMemoryNeeds{plan.parameters, plan.workspace, plan.flag_count, tuning.own_workspace},
      [make = plan.make, options](const kernels::RankContext& context, std::uint64_t data_moved) {
        return make(context, options, data_moved);
      },
      plan.op);
}

}  // namespace mk
