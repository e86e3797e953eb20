/// \file
/// The host side that all operators on GPUs share: what stays between launches, and what became of
/// a launch. Operators add their tensor maps.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/comm/banks.h"
#include "kernels/comm/launch.h"
#include "kernels/comm/launch_stats.h"
#include "kernels/comm/partition_step.h"
#include "kernels/comm/rank_context.h"
#include "kernels/cuda/host/adaptive_blocks.h"
#include "kernels/cuda/host/cuda_options.h"
#include "kernels/cuda/host/launch_range.h"
#include "kernels/cuda/host/launch_turn.h"
#include "kernels/cuda/host/launches_in_flight.h"
#include "kernels/cuda/host/on_device.h"
#include "kernels/cuda/host/role_blocks.h"
#include "kernels/cuda/skeleton/launch_state.h"
#include "shm/host/result.h"

namespace mk::kernels::cuda {

/// The job's plan that the options have, or by the shipped files for the calling thread's GPU.
/// kUnavailable without one.
Result<std::shared_ptr<const plan::JobPlan>> job_plan_of(const CudaOptions& options);

/// Which of an operator's arrival flags a launch looks at.
struct PolledFlags {
  std::uint32_t count = 0;           ///< all there are
  std::uint32_t bank_arrivals = 0;   ///< of them, of each bank, one bank after the other
  std::uint32_t releases_begin = 0;  ///< where those begin that every launch looks at
  std::uint32_t banks = 1;

  /// Those of its bank, and the releases.
  PolledFlags(const FlagMap& map)  // NOLINT(google-explicit-constructor)
      : count(map.count()),
        bank_arrivals(map.bank_arrivals()),
        releases_begin(map.banks * map.bank_arrivals()),
        banks(map.banks) {}
  /// Of an operator with several maps: all.
  PolledFlags(std::uint32_t all, std::uint32_t banks_in) : count(all), banks(banks_in) {}
};

/// One rank's operator between its launches, on the device that is current at start.
class OperatorFrame {
 public:
  explicit OperatorFrame(const char* op) : op_(op) {}
  ~OperatorFrame();
  OperatorFrame(const OperatorFrame&) = delete;
  OperatorFrame& operator=(const OperatorFrame&) = delete;

  /// Takes the calling thread's current device, and answers its multiprocessors. kUnsupported for
  /// one that is no Hopper.
  Result<std::uint32_t> choose_device(const CudaOptions& options);
  /// Checks device and context, deals out the blocks, and fills in what launches share: all of
  /// `launch` but plan, epoch, m and mode, and all of `frame`. `flags`: the plan's.
  Status start(const RankContext& context, const CudaOptions& options, const GroupNeeds& needs,
               const PolledFlags& flags, Launch& launch, FrameArguments& frame);
  int device() const { return device_; }
  /// After start(): the plan has copy engines whose rows not every rank waits for.
  void engines_outlast_launches() { turn_.outlasts(); }

  /// kSystem with CUDA's reason.
  Status check(cudaError_t error, const char* what) const;
  /// Before a launch: its blocks, if the partition is adaptive (CudaOptions::adaptive). `m`: what
  /// launches are told apart by; each m has a search of its own.
  void choose_blocks(cudaStream_t stream, std::uint32_t m, Mode mode, RoleBlocks& blocks,
                     FrameArguments& frame) const {
    if (adaptive_ != nullptr) adaptive_->choose(stream, m, mode == Mode::kFused, blocks, frame);
  }
  /// Thread blocks of any launch, at most; `now`: of the next one.
  ThreadBlocks blocks_max(ThreadBlocks now) const {
    return adaptive_ != nullptr ? std::max(now, adaptive_->all()) : now;
  }
  /// Puts a launch on the stream, after what takes its turn.
  template <class Kernel, class Arguments>
  Status put_on(cudaStream_t stream, const Kernel& kernel, Arguments& arguments) {
    if (turn_.heeds_peers()) arguments.frame.heeds_peers = true;
    MK_RETURN_IF_ERROR(check(turn_.put_on(stream), "its turn was refused"));
    const LaunchTold& told = arguments.frame.host.told;
    const LaunchRange range(name_.of(told), told.m, told.tag);
    cudaGetLastError();  // launches answer the thread's last error, whose ever it is
    MK_RETURN_IF_ERROR(check(kernel.launch(arguments, stream), "the launch was refused"));
    turn_.note_put();
    in_flight_.note(stream);
    if (adaptive_ != nullptr) adaptive_->measure(stream);
    return {};
  }
  /// What the host has been told; does not wait.
  Status status() const;
  /// Waits for the stream, then answers what the last launch did, or the first failure: all but its
  /// m, form and estimate.
  Result<LaunchStats> finish(cudaStream_t stream) const;
  /// If the partition is adaptive, that of the last launch which `finish` has seen, with its begin
  /// in the GPU's clock.
  std::vector<PartitionStep> partition_steps() const { return steps_; }
  /// How far a launch has come that does not end: for users.
  std::string progress(const Launch& launch) const;

 private:
  Status adopt_context(const RankContext& context, const PolledFlags& polled, Launch& launch,
                       FrameArguments& frame);

  const char* op_;
  LaunchName name_;
  LaunchTurn turn_;
  LaunchInFlight in_flight_;
  int device_ = -1;  ///< none yet
  World world_;
  DeviceState* state_ = nullptr;
  std::uint32_t* flags_ = nullptr;
  HostReport* report_ = nullptr;
  std::unique_ptr<AdaptiveBlocks> adaptive_;  ///< null: launches have the blocks of the start
  mutable std::vector<PartitionStep> steps_;  ///< `finish` makes them
};

}  // namespace mk::kernels::cuda
