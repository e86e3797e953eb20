#include "kernels/cuda/host/operator_frame.h"

#include "kernels/cuda/host/planned.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <new>
#include <utility>

#include "kernels/comm/wait_text.h"
#include "kernels/comm/workspace_head.h"
#include "kernels/cuda/skeleton/launch_accounts.h"
#include "kernels/plan/legal.h"

namespace mk::kernels::cuda {
namespace {

/// A lane of the poller loads so much at a time.
constexpr std::uint64_t kPolledBytes = 16;

}  // namespace

Result<std::shared_ptr<const plan::JobPlan>> job_plan_of(const CudaOptions& options) {
  if (options.job_plan != nullptr) return options.job_plan;
  int device = 0;
  cudaDeviceProp properties;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaGetDeviceProperties(&properties, device);
  if (error != cudaSuccess)
    return fail(ErrorCode::kUnavailable, "no CUDA device: {}", cudaGetErrorString(error));
  return job_plan_for(properties.name, static_cast<std::uint32_t>(properties.multiProcessorCount));
}

OperatorFrame::~OperatorFrame() {
  const OnDevice on_device(device_);
  adaptive_.reset();
  cudaFree(state_);
  cudaFree(flags_);
  cudaFreeHost(report_);
}

Status OperatorFrame::check(cudaError_t error, const char* what) const {
  if (error == cudaSuccess) return {};
  cudaGetLastError();  // clears it
  return fail(ErrorCode::kSystem, "{}: {}: {}", op_, what, cudaGetErrorString(error));
}

Result<std::uint32_t> OperatorFrame::choose_device(const CudaOptions& options) {
  if (options.ranks_per_device < 1 || options.ranks_per_device > shm::kLocalRanksMax) {
    return fail(ErrorCode::kInvalidArgument, "{}: {} ranks on one device; 1 to {} are possible",
                op_, options.ranks_per_device, shm::kLocalRanksMax);
  }
  if (options.wait_timeout <= std::chrono::nanoseconds::zero() ||
      options.wait_timeout > kWaitTimeoutMax) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: a wait timeout of {} ns; on a GPU it is more than zero and at most {} s", op_,
                options.wait_timeout.count(),
                std::chrono::duration_cast<std::chrono::seconds>(kWaitTimeoutMax).count());
  }
  int major = 0;
  int multiprocessors = 0;
  if (cudaError_t error = cudaGetDevice(&device_); error != cudaSuccess) {
    return fail(ErrorCode::kUnavailable, "{}: no CUDA device: {}", op_, cudaGetErrorString(error));
  }
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device_);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device_);
  if (major != 9) {
    return fail(ErrorCode::kUnsupported,
                "{}: device {} has compute capability {}.x; the kernel is for 9.0 (H100, H200)",
                op_, device_, major);
  }
  return static_cast<std::uint32_t>(multiprocessors);
}

Status OperatorFrame::start(const RankContext& context, const CudaOptions& options,
                            const GroupNeeds& needs, const PolledFlags& flags, Launch& launch,
                            FrameArguments& frame) {
  world_ = context.world;
  frame.host.launches = options.launches;
  launch.control.timeout_ns = static_cast<std::uint64_t>(options.wait_timeout.count());
  MK_ASSIGN_OR_RETURN(const std::uint32_t multiprocessors, choose_device(options));
  MK_RETURN_IF_ERROR(adopt_context(context, flags, launch, frame));
  // The kernel takes nearly all of a multiprocessor's shared memory: one block on each.
  const bool adapts = options.adaptive && needs.multiplies && world_.size() > 1;
  MK_RETURN_IF_ERROR(cuda::choose_blocks(op_, adapts ? without_groups(options) : options, needs,
                                         context.lane_count, multiprocessors, launch.blocks,
                                         frame));
  if (adapts) {
    ThreadBlocks all = plan::blocks_of_share(multiprocessors, options.ranks_per_device);
    if (options.compute_blocks != 0) all = all_blocks(frame, launch.blocks);
    adaptive_ = AdaptiveBlocks::create(all, options, needs.watchers, launch.blocks, frame);
  }
  frame.host.lane_count = launch.blocks.send;
  frame.host.progress = options.progress;
  frame.host.told.op = shm::progress_operator(op_);
  launch.banks = flags.banks;
  return {};
}

/// Device memory, and a context whose words of the host are their mirrors.
Status OperatorFrame::adopt_context(const RankContext& context, const PolledFlags& polled,
                                    Launch& launch, FrameArguments& frame) {
  void* state = nullptr;
  MK_RETURN_IF_ERROR(check(cudaMalloc(&state, sizeof(DeviceState)), "memory"));
  state_ = static_cast<DeviceState*>(state);
  auto first = std::make_unique<DeviceState>();
  frame.state = state_;
  launch.context = context;
  launch.context.shared = nullptr;  // the host's alone: turn_ has it
  HostWords& host = frame.host;
  if (context.world.nodes > 1) {
    host.flag_count = static_cast<std::uint32_t>(round_up_to(polled.count, 4));
    host.bank_flags = polled.bank_arrivals;
    host.releases_begin = polled.releases_begin;
    if (host.flag_count > kPolledFlagsMax) {
      return fail(ErrorCode::kLimitExceeded, "{}: {} arrival flags are more than a GPU polls ({})",
                  op_, polled.count, kPolledFlagsMax);
    }
    if (reinterpret_cast<std::uintptr_t>(context.arrival_flags) % kPolledBytes != 0) {
      return fail(ErrorCode::kInvalidArgument, "{}: the arrival flags begin amid a granule", op_);
    }
    void* flags = nullptr;
    MK_RETURN_IF_ERROR(check(cudaMalloc(&flags, host.flag_count * 4), "memory"));
    flags_ = static_cast<std::uint32_t*>(flags);
    MK_RETURN_IF_ERROR(check(cudaMemset(flags_, 0, host.flag_count * 4), "memory"));
    host.flags = context.arrival_flags;
    host.flags_here = flags_;
    launch.context.arrival_flags = flags_;

    const std::uint32_t lanes = std::min(context.lane_count, shm::kLanesMax);
    MK_RETURN_IF_ERROR(check(cudaMemcpy(first->lanes, context.lanes,
                                        lanes * sizeof(shm::RingProducer), cudaMemcpyDefault),
                             "the session's lanes"));
    host.session_lanes = context.lanes;
    for (std::uint32_t lane = 0; lane < lanes; ++lane) {
      host.controls[lane] = first->lanes[lane].ring.control;
      first->lanes[lane].ring.control = &state_->controls[lane];
    }
    launch.context.lanes = state_->lanes;
    std::copy_n(context.rail_peers, context.world.nodes, first->rail_peers);
    launch.context.rail_peers = state_->rail_peers;
  }
  const std::uint32_t* const aborts[2] = {context.session_abort, context.process_abort};
  const std::uint32_t** mirrored[2] = {&launch.context.session_abort,
                                       &launch.context.process_abort};
  for (int i = 0; i < 2; ++i) {
    if (aborts[i] == nullptr || context.world.size() == 1) continue;
    host.aborts[i] = aborts[i];
    *mirrored[i] = &state_->aborts[i];
  }
  frame.pollers =
      host.flags != nullptr || host.aborts[0] != nullptr || host.aborts[1] != nullptr ? 1 : 0;

  MK_RETURN_IF_ERROR(
      check(cudaMemcpy(state_, first.get(), sizeof *first, cudaMemcpyHostToDevice), "memory"));
  MK_RETURN_IF_ERROR(check(cudaStreamSynchronize(nullptr), "memory"));
  void* report = nullptr;
  MK_RETURN_IF_ERROR(
      check(cudaHostAlloc(&report, sizeof(HostReport), cudaHostAllocMapped | cudaHostAllocPortable),
            "pinned memory"));
  report_ = new (report) HostReport;
  frame.report = report_;

  launch.local = &state_->local;
  WaitControl& control = launch.control;
  control.session_abort = launch.context.session_abort;
  control.process_abort = launch.context.process_abort;
  control.peer_failed = reinterpret_cast<std::uint32_t*>(context.workspaces[context.world.local] +
                                                         WorkspaceHead::failed());
  control.stop = &state_->local.stop;
  control.record = &state_->local.failure;
  MK_RETURN_IF_ERROR(check(in_flight_.start(), "an event"));
  return check(turn_.start(context, launch, frame), "the device refuses the kernel of turns");
}

Status OperatorFrame::status() const {
  switch (shm::load_acquire(&report_->failed)) {
    case HostReport::kNone:
      return {};
    case HostReport::kLaunchesSpent:
      return fail(ErrorCode::kLimitExceeded,
                  "{}: {} launches are all that one operator makes; create a new one", op_,
                  report_->epoch - 1);
    default: {
      Error error = describe(report_->record, op_, report_->epoch, world_, report_->peer_failed);
      turn_.explain(report_->record, error);
      return tl::unexpected<Error>(std::move(error));
    }
  }
}

Result<LaunchStats> OperatorFrame::finish(cudaStream_t stream) const {
  const OnDevice on_device(device_);
  MK_RETURN_IF_ERROR(check(cudaStreamSynchronize(stream), "the launch failed"));
  MK_RETURN_IF_ERROR(status());
  auto state = std::make_unique<DeviceState>();
  MK_RETURN_IF_ERROR(
      check(cudaMemcpyAsync(state.get(), state_, sizeof *state, cudaMemcpyDeviceToHost, stream),
            "statistics"));
  MK_RETURN_IF_ERROR(check(cudaStreamSynchronize(stream), "statistics"));
  const LaunchAccount& account = state->accounts[state->epoch % 2];
  LaunchStats stats = stats_of(account, state->epoch);
  if (adaptive_ != nullptr) {
    stats.partition = adaptive_->stats();
    steps_ = {{~account.begin_ns_inverted, stats.partition.last, stats.partition.last}};
  }
  return stats;
}

LaunchStats stats_of(const LaunchAccount& account, std::uint32_t epoch) {
  LaunchStats stats;
  stats.epoch = epoch;
  const std::uint64_t begin_ns = ~account.begin_ns_inverted;
  stats.total_ns = account.end_ns - begin_ns;
  for (std::uint32_t role = 0; role < kRoles; ++role) {
    const RoleAccount& from = account.roles[role];
    RoleStats& to = stats.roles[role];
    to.blocks = static_cast<std::uint32_t>(from.groups);
    to.end_ns = from.groups == 0 ? 0 : from.end_ns - begin_ns;
    to.waits = from.waits;
    to.wait_ns = from.wait_ns;
    stats.commands += from.commands;
    stats.network_bytes += from.network_bytes;
  }
  stats.gemm_ns = stats.role(Role::kCompute).end_ns;
  return stats;
}

std::string OperatorFrame::progress(const Launch& launch) const {
  const OnDevice on_device(device_);
  auto state = std::make_unique<DeviceState>();
  cudaStream_t stream = nullptr;
  // The copy engine's work: it does not wait for the launch.
  const bool read = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess &&
                    cudaMemcpyAsync(state.get(), state_, sizeof *state, cudaMemcpyDeviceToHost,
                                    stream) == cudaSuccess &&
                    cudaStreamSynchronize(stream) == cudaSuccess;
  cudaStreamDestroy(stream);
  if (!read) return "its device memory cannot be read";
  const std::uint32_t epoch = state->epoch + 1;
  std::string tiles;
  std::uint32_t computed = 0;
  for (std::uint32_t block = 0; block < launch.blocks.compute; ++block) {
    if (state->local.done_by(Role::kCompute)[block] == epoch) {
      ++computed;
    } else if (tiles.size() < 60) {
      tiles += fmt::format(" {}", block);
    }
  }
  return fmt::format(
      "{} launch {} on rank {}: {} of {} compute blocks have their tiles (not:{}); {} groups and "
      "{} "
      "blocks have ended, {} steps are taken, stop {}",
      op_, epoch, world_.rank(), computed, launch.blocks.compute, tiles, state->groups_done,
      state->blocks_done, state->streams_taken + state->receives_taken, state->local.stop);
}

}  // namespace mk::kernels::cuda
