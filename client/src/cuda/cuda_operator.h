/// \file
/// What operators on a GPU have in common: the memory, the kernels, the barrier.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "client/src/device_operator.h"
#include "client/src/gpu_launches.h"
#include "client/src/operator_support.h"
#include "client/src/shared_workspace.h"
#include "kernels/cuda/host/cuda_options.h"
#include "kernels/cuda/host/launches_in_flight.h"
#include "kernels/cuda/host/on_device.h"
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
class CudaOperator : public Interface, private MovingOperator {
 public:
  /// Makes the kernels' side, of a plan whose data is moved so far.
  using Create = std::function<Result<std::unique_ptr<Cuda>>(const kernels::RankContext& context,
                                                             std::uint64_t data_moved)>;

  CudaOperator(OperatorWorkspace memory, Create create, std::unique_ptr<Cuda> cuda,
               CudaStream stream)
      : memory_(std::move(memory)),
        create_(std::move(create)),
        cuda_(std::move(cuda)),
        stream_(stream) {
    cudaGetDevice(&device_);
    memory_.let_move(*this);
  }
  ~CudaOperator() override {
    memory_.let_move_no_more(*this);
    cudaStreamDestroy(stream_);
    memory_.keep(to_free(std::move(cuda_)));
  }
  CudaOperator(const CudaOperator&) = delete;
  CudaOperator& operator=(const CudaOperator&) = delete;

  Status status() const override { return cuda_->status(); }
  bool usable() const override { return status().has_value() && memory_.usable(); }
  bool claim_workspace() override { return memory_.claim(); }
  Result<kernels::LaunchStats> finish(CudaStream stream) override {
    if (moved_stats_ && !memory_.has_launched()) return *moved_stats_;
    return cuda_->finish(stream);
  }
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
  /// Whether its caller reads nothing in the workspace: before it has launched, and afterwards.
  virtual bool leaves_nothing(bool /*launched*/) const { return true; }

 private:
  bool may_move() override {
    const bool launched = memory_.has_launched();
    if (traced_ || !leaves_nothing(launched)) return false;
    if (!launched) return status().has_value();
    const auto stats = cuda_->finish(stream_);
    if (!stats) return false;
    ended_stats_ = *stats;
    return true;
  }
  Status prepare_move(const kernels::RankContext& context, std::uint64_t data_moved) override {
    MK_ASSIGN_OR_RETURN(next_, create_(context, data_moved));
    return {};
  }
  void stay() override { next_.reset(); }
  void move(SharedMemory& old) override {
    if (memory_.has_launched()) moved_stats_ = ended_stats_;
    old.keep(to_free(std::exchange(cuda_, std::move(next_))));
  }
  /// Its memory goes with the workspace, on whatever thread.
  std::shared_ptr<void> to_free(std::unique_ptr<Cuda> cuda) const {
    return std::shared_ptr<Cuda>(cuda.release(), [device = device_](Cuda* gone) {
      const kernels::cuda::OnDevice on_device(device);
      const kernels::cuda::BesidesCaptures besides;
      delete gone;
    });
  }

  OperatorWorkspace memory_;
  const Create create_;
  std::unique_ptr<Cuda> cuda_;  ///< goes first: it uses the memory
  std::unique_ptr<Cuda> next_;  ///< where it may move
  kernels::LaunchStats ended_stats_;
  std::optional<kernels::LaunchStats> moved_stats_;  ///< of the last launch before it moved
  const CudaStream stream_;
  int device_ = 0;
  bool traced_ = false;
};

/// Makes the kernels' side of an operator from its plan, by `create(plan, context)`.
template <class Plan, class Create>
auto moved_plan_maker(const Plan& plan, Create create) {
  return [plan, create = std::move(create)](const kernels::RankContext& context,
                                            std::uint64_t data_moved) {
    Plan moved = plan;
    moved.move_data(data_moved);
    return create(moved, context);
  };
}

/// The parts of an operator's memory.
struct DeviceMemoryNeeds {
  std::string parameters;
  kernels::WorkspaceParts workspace;
  std::uint32_t flag_count = 0;
  bool own = false;  ///< Tuning::own_workspace

  template <class Plan>
  static DeviceMemoryNeeds of(const Plan& plan, const Tuning& tuning) {
    return {describe_plan(plan), plan.workspace, plan.flag_count(), tuning.own_workspace};
  }
};

/// From the agreed plan to the operator. `create`: CudaOperator::Create; it outlives the call.
/// `more` follows in Operator's constructor.
template <class Operator, class Create, class... More>
Result<std::unique_ptr<Operator>> make_device_operator(Session::Impl& session, std::string_view op,
                                                       const DeviceMemoryNeeds& needs,
                                                       Create create, const More&... more) {
  client::GpuLaunches::ask_also(&kernels::cuda::LaunchInFlight::any);
  const std::string tag = session.next_operator_tag("ready");
  const auto make = [&]() -> Result<std::unique_ptr<Operator>> {
    MK_ASSIGN_OR_RETURN(auto memory,
                        OperatorWorkspace::create(session, op, needs.parameters, needs.workspace,
                                                  needs.flag_count, needs.own, Executor::kCuda));
    MK_ASSIGN_OR_RETURN(auto cuda, create(memory.context(), memory.data_moved()));
    cudaStream_t stream = nullptr;
    const cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    if (error != cudaSuccess) {
      return fail(ErrorCode::kSystem, "{}: cannot make a stream: {}", op,
                  cudaGetErrorString(error));
    }
    return std::make_unique<Operator>(std::move(memory), std::move(create), std::move(cuda), stream,
                                      more...);
  };
  auto made = make();
  MK_RETURN_IF_ERROR(session.agree(tag, op, made.map([](const auto&) {})));
  return made;
}

}  // namespace mk
