#include "kernels/cuda/host/adaptive_blocks.h"

#include <algorithm>

#include "kernels/cuda/host/on_device.h"
#include "kernels/cuda/skeleton/launch_accounts.h"

namespace mk::kernels::cuda {

/// A launch's account, as it comes behind the launch.
class AdaptiveBlocks::Measurement {
 public:
  Measurement() {
    const BesidesCaptures besides;
    void* memory = nullptr;
    if (cudaHostAlloc(&memory, sizeof(LaunchAccounts), cudaHostAllocDefault) == cudaSuccess)
      accounts_ = static_cast<LaunchAccounts*>(memory);
    cudaEventCreateWithFlags(&copied_, cudaEventDisableTiming);
  }
  ~Measurement() {
    const BesidesCaptures besides;
    // A copy may be on its way.
    if (copied_ != nullptr) {
      cudaEventSynchronize(copied_);
      cudaEventDestroy(copied_);
    }
    cudaFreeHost(accounts_);
  }
  Measurement(const Measurement&) = delete;
  Measurement& operator=(const Measurement&) = delete;

  /// The launch is queued, also where its time cannot be had.
  void begin(const DeviceState* state, cudaStream_t stream) {
    begun_ = accounts_ != nullptr && copied_ != nullptr &&
             cudaMemcpyAsync(accounts_, &state->accounts, sizeof *accounts_, cudaMemcpyDeviceToHost,
                             stream) == cudaSuccess &&
             cudaEventRecord(copied_, stream) == cudaSuccess;
    if (!begun_) cudaGetLastError();  // clears it
  }
  bool is_there() const {
    if (!begun_) return true;
    const BesidesCaptures besides;
    const bool there = cudaEventQuery(copied_) == cudaSuccess;
    if (!there) cudaGetLastError();  // clears it
    return there;
  }
  /// 0: the launch has failed, or nobody knows. (The next one's account is zero.)
  std::uint64_t ns() const {
    if (!begun_) return 0;
    const LaunchAccount& one = accounts_->of[0];
    const LaunchAccount& other = accounts_->of[1];
    const LaunchAccount& account = one.end_ns > other.end_ns ? one : other;
    const std::uint64_t begin_ns = ~account.begin_ns_inverted;
    return account.end_ns > begin_ns ? account.end_ns - begin_ns : 0;
  }

 private:
  LaunchAccounts* accounts_ = nullptr;
  cudaEvent_t copied_ = nullptr;
  bool begun_ = false;
};

namespace {

bool is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(stream, &status) != cudaSuccess ||
         status != cudaStreamCaptureStatusNone;
}

}  // namespace

std::unique_ptr<AdaptiveBlocks> AdaptiveBlocks::create(ThreadBlocks all, const CudaOptions& options,
                                                       Warpgroups watchers,
                                                       const RoleBlocks& blocks,
                                                       const FrameArguments& frame) {
  const CommShares shares = shares_of(watchers, blocks, frame);
  const CommTargets targets = targets_of(all, shares, blocks, frame);
  const std::uint32_t planned = frame.comm_blocks.count();
  if (targets.least >= targets.most || planned > targets.most) return nullptr;
  const bool named = options.stream_groups != 0 || options.receive_groups != 0;
  const std::uint32_t first =
      named ? targets.of(shares, options.stream_groups, options.receive_groups)
            : std::max(planned, targets.least);
  return std::unique_ptr<AdaptiveBlocks>(
      new AdaptiveBlocks(all, first, shares, targets, frame.state));
}

AdaptiveBlocks::AdaptiveBlocks(ThreadBlocks all, ThreadBlocks comm, const CommShares& shares,
                               const CommTargets& targets, const DeviceState* state)
    : all_(all),
      shares_(shares),
      state_(state),
      searches_(std::make_unique<PartitionSearches<Measurement>>(targets.least, targets.most,
                                                                 comm.count())) {}

AdaptiveBlocks::~AdaptiveBlocks() = default;

void AdaptiveBlocks::choose(cudaStream_t stream, std::uint32_t m, bool adapts, RoleBlocks& blocks,
                            FrameArguments& frame) {
  const std::uint32_t target =
      adapts ? searches_->choose(m, !is_captured(stream)) : searches_->choose_first();
  deal_blocks(all_, target, shares_, blocks, frame);
}

void AdaptiveBlocks::measure(cudaStream_t stream) {
  if (Measurement* const its = searches_->next_measurement(); its != nullptr)
    its->begin(state_, stream);
}

PartitionStats AdaptiveBlocks::stats() const { return searches_->stats(); }

}  // namespace mk::kernels::cuda
