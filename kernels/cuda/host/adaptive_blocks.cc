#include "kernels/cuda/host/adaptive_blocks.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/cuda/skeleton/launch_accounts.h"

namespace mk::kernels::cuda {
namespace {

/// Launches of which the quickest counts.
constexpr std::uint32_t kMeasured = 3;
/// Targets change every so many launches: where ranks launch alike, with all of them at one time.
constexpr std::uint32_t kWindow = 4;
/// So many launches go by between two windows once a search is settled.
constexpr std::uint32_t kRest = 60;
/// Before the first ones, so many launches, as the GPU's clock and caches are not yet what they
/// will be.
constexpr std::uint32_t kWarmUp = 2 * kWindow;
/// More heights than that take the target of the nearest one.
constexpr std::size_t kHeightsMax = 16;

/// A launch's account, as it comes behind the launch.
class Measurement {
 public:
  Measurement() {
    void* memory = nullptr;
    if (cudaHostAlloc(&memory, sizeof(LaunchAccounts), cudaHostAllocDefault) == cudaSuccess)
      accounts_ = static_cast<LaunchAccounts*>(memory);
    cudaEventCreateWithFlags(&copied_, cudaEventDisableTiming);
  }
  ~Measurement() {
    // A copy may be on its way.
    if (copied_ != nullptr) {
      cudaEventSynchronize(copied_);
      cudaEventDestroy(copied_);
    }
    cudaFreeHost(accounts_);
  }
  Measurement(const Measurement&) = delete;
  Measurement& operator=(const Measurement&) = delete;

  cudaError_t begin(const DeviceState* state, cudaStream_t stream) {
    if (accounts_ == nullptr || copied_ == nullptr) return cudaErrorMemoryAllocation;
    const cudaError_t error = cudaMemcpyAsync(accounts_, &state->accounts, sizeof *accounts_,
                                              cudaMemcpyDeviceToHost, stream);
    return error != cudaSuccess ? error : cudaEventRecord(copied_, stream);
  }
  bool is_there() const { return cudaEventQuery(copied_) == cudaSuccess; }
  /// 0: the launch has failed. (The next one's account is zero.)
  std::uint64_t ns() const {
    const LaunchAccount& one = accounts_->of[0];
    const LaunchAccount& other = accounts_->of[1];
    const LaunchAccount& account = one.end_ns > other.end_ns ? one : other;
    const std::uint64_t begin_ns = ~account.begin_ns_inverted;
    return account.end_ns > begin_ns ? account.end_ns - begin_ns : 0;
  }

 private:
  LaunchAccounts* accounts_ = nullptr;
  cudaEvent_t copied_ = nullptr;
};

bool is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(stream, &status) != cudaSuccess ||
         status != cudaStreamCaptureStatusNone;
}

}  // namespace

/// The search for launches of one height.
struct AdaptiveBlocks::Sought {
  explicit Sought(const PartitionSearch& begin) : search(begin) {}

  /// Before a launch that may be measured.
  void turn() {
    if (rest != 0) {
      --rest;
      return;
    }
    // Not all at once: those that are under way may be the last ones with the old target.
    if (launches < kWindow || launches % kWindow != 0) return;
    std::array<std::uint64_t, kMeasured> ns{};
    std::uint32_t count = 0;
    for (const Measurement& one : measurements) {
      if (!one.is_there()) return;
      if (const std::uint64_t its = one.ns(); its != 0) ns[count++] = its;
    }
    launches = 0;
    std::sort(ns.begin(), ns.begin() + count);
    // One may be late by itself: the second tells by how much launches differ.
    if (count != 0) search.measured(ns[0], ns[std::min(count - 1, 1u)] - ns[0]);
    if (search.settled()) rest = kRest;
  }

  PartitionSearch search;
  std::array<Measurement, kMeasured> measurements;
  std::uint32_t launches = 0;    ///< with this target, since it was chosen or rested
  std::uint32_t rest = kWarmUp;  ///< launches that nobody measures
};

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
    : all_(all), first_(comm), shares_(shares), targets_(targets), state_(state) {
  stats_.first = stats_.last = comm.count();
}

AdaptiveBlocks::~AdaptiveBlocks() = default;

/// A height that is new begins with what the nearest one has learned.
AdaptiveBlocks::Sought& AdaptiveBlocks::sought_for(std::uint32_t m) {
  if (const auto found = sought_.find(m); found != sought_.end()) return *found->second;
  Sought* nearest = nullptr;
  double least = 0;
  for (const auto& [height, sought] : sought_) {
    const double distance = std::abs(std::log(static_cast<double>(height) / m));
    if (nearest != nullptr && distance >= least) continue;
    nearest = sought.get();
    least = distance;
  }
  if (sought_.size() >= kHeightsMax) return *nearest;
  const std::uint32_t start = nearest == nullptr ? first_.count() : nearest->search.best();
  auto made = std::make_unique<Sought>(PartitionSearch(targets_.least, targets_.most, start));
  return *sought_.emplace(m, std::move(made)).first->second;
}

void AdaptiveBlocks::choose(cudaStream_t stream, std::uint32_t m, bool adapts, RoleBlocks& blocks,
                            FrameArguments& frame) {
  measured_ = nullptr;
  std::uint32_t target = first_.count();
  if (adapts) {
    Sought& sought = sought_for(m);
    const bool known = sought_.count(m) != 0;
    if (known && !is_captured(stream)) {
      sought.turn();
      target = sought.search.target();
      if (sought.rest == 0) measured_ = &sought;
    } else {
      target = sought.search.best();
    }
  }
  if (target != frame.comm_blocks.count()) ++stats_.moves;
  stats_.first = stats_.last = target;
  deal_blocks(all_, target, shares_, blocks, frame);
}

cudaError_t AdaptiveBlocks::measure(cudaStream_t stream) {
  if (measured_ == nullptr) return cudaSuccess;
  Sought& sought = *measured_;
  measured_ = nullptr;
  const std::uint32_t place = sought.launches++;
  if (place >= kMeasured) return cudaSuccess;
  return sought.measurements[place].begin(state_, stream);
}

}  // namespace mk::kernels::cuda
