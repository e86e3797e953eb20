/// \file
/// What operators on a GPU have in common: the memory, the kernels, the barrier.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "client/src/device_operator.h"
#include "client/src/operator_memory.h"
#include "client/src/operator_support.h"
#include "kernels/cuda/host/cuda_options.h"
#include "kernels/cuda/skeleton/launch_state.h"

namespace mk {

/// Multiprocessors that the rank with the fewest has: tiles, on which all ranks agree, go by it.
struct DeviceShare {
  std::uint32_t blocks = 0;
  std::uint32_t ranks_per_device = 1;  ///< of this rank's device
  std::uint32_t most_ranks = 1;        ///< of any
  std::uint32_t lanes = 1;             ///< of this rank's session
  std::uint64_t* launches = nullptr;   ///< GpuSession::launches
  shm::Progress* progress = nullptr;   ///< GpuSession::progress
};
/// Collective.
Result<DeviceShare> share_device(Session::Impl& session);
/// What that would answer, by what is known here: not collective. Until the session's first
/// operator on a GPU, as if this rank had the GPU to itself.
Result<DeviceShare> expected_share(Session::Impl& session);

inline kernels::CudaOptions cuda_options(const DeviceShare& share, const Tuning& tuning) {
  using kernels::Sms;
  kernels::CudaOptions options;
  options.ranks_per_device = share.ranks_per_device;
  options.compute_blocks = thread_blocks_of(Sms(tuning.compute_sms));
  options.stream_groups = warpgroups_of(Sms(std::max(tuning.reduce_sms, tuning.share_sms)));
  options.send_groups = std::min(warpgroups_of(Sms(tuning.send_sms)).count(), share.lanes);
  options.receive_groups = warpgroups_of(Sms(tuning.receive_sms));
  options.wait_timeout = std::min(
      tuning.wait_timeout,
      std::chrono::duration_cast<std::chrono::milliseconds>(kernels::cuda::kWaitTimeoutMax));
  options.batch_invariant = tuning.batch_invariant;
  options.adaptive = tuning.partition == Partition::kAdaptive;
  options.rates = kernel_rates(tuning.rates);
  options.launches = share.launches;
  options.progress = share.progress;
  return options;
}

/// Of what a launch is given: in the memory of the calling thread's GPU, so that a kernel can use
/// it; or null. kInvalidArgument names it.
Status check_on_gpu(std::string_view op, const char* name, const void* memory);

/// `Interface`: of device_operator.h. `Cuda`: the operator in kernels/.
template <class Interface, class Cuda>
class CudaOperator : public Interface {
 public:
  CudaOperator(OperatorMemory memory, std::unique_ptr<Cuda> cuda, CudaStream stream)
      : memory_(std::move(memory)), cuda_(std::move(cuda)), stream_(stream) {
    cudaGetDevice(&device_);
  }
  ~CudaOperator() override {
    cudaStreamDestroy(stream_);
    // Its memory goes with the workspace, on a thread that has no device of its own yet.
    memory_.keep(std::shared_ptr<Cuda>(cuda_.release(), [device = device_](Cuda* cuda) {
      cudaSetDevice(device);
      delete cuda;
    }));
  }
  CudaOperator(const CudaOperator&) = delete;
  CudaOperator& operator=(const CudaOperator&) = delete;

  Status status() const override { return cuda_->status(); }
  Result<kernels::LaunchStats> finish(CudaStream stream) override { return cuda_->finish(stream); }
  CudaStream own_stream() override { return stream_; }
  void set_tag(std::uint64_t tag) override { cuda_->set_tag(tag); }
  void set_trace(bool on) override { traced_ = on; }
  std::vector<kernels::PartitionStep> partition_steps() const override {
    if constexpr (requires { cuda_->partition_steps(); }) {
      if (traced_) return cuda_->partition_steps();
    }
    return {};
  }

 protected:
  Cuda& cuda() const { return *cuda_; }

 private:
  OperatorMemory memory_;
  std::unique_ptr<Cuda> cuda_;  ///< goes first: it uses the memory
  const CudaStream stream_;
  int device_ = 0;
  bool traced_ = false;
};

template <class Plan>
std::uint64_t workspace_bytes_of(const Plan& plan) {
  if constexpr (requires { plan.workspace_bytes(); }) {
    return plan.workspace_bytes();
  } else {
    return plan.workspace_bytes;
  }
}

/// From the agreed plan to the operator. `create(memory)` makes the kernels' side of it; `more`
/// follows in Operator's constructor.
template <class Operator, class Create, class... More>
Result<std::unique_ptr<Operator>> make_device_operator(Session::Impl& session, std::string_view op,
                                                       const std::string& parameters,
                                                       std::uint64_t workspace_bytes,
                                                       std::uint32_t flag_count, Create&& create,
                                                       const More&... more) {
  MK_ASSIGN_OR_RETURN(auto memory, OperatorMemory::create(session, op, parameters, workspace_bytes,
                                                          flag_count, Executor::kCuda));
  MK_ASSIGN_OR_RETURN(auto cuda, create(memory));
  cudaStream_t stream = nullptr;
  const cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (error != cudaSuccess)
    return fail(ErrorCode::kSystem, "{}: cannot make a stream: {}", op, cudaGetErrorString(error));
  auto made = std::make_unique<Operator>(std::move(memory), std::move(cuda), stream, more...);
  MK_RETURN_IF_ERROR(session.barrier(session.options().timeout));
  return made;
}

}  // namespace mk
