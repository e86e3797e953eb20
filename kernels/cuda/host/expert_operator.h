/// \file
/// What the two halves of a MoE layer are derived from on a GPU: plan and arguments of one rank,
/// the launches that it refused, and all of creation and launch that does not depend on which half
/// it is.
#pragma once

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "kernels/comm/launch_stats.h"
#include "kernels/comm/plan_tools.h"
#include "kernels/comm/rank_context.h"
#include "kernels/comm/shard.h"
#include "kernels/cuda/host/cuda_options.h"
#include "kernels/cuda/host/operator_frame.h"
#include "kernels/cuda/host/operator_inputs.h"
#include "kernels/cuda/host/planned.h"
#include "kernels/plan/accounted.h"
#include "shm/host/result.h"

namespace mk::kernels::cuda {

/// `Plan`: of kernels/ops/<operator>/spec.h. `Arguments`: OperatorArguments or derived, with the
/// columns of tiles. `Refusals`: of its launch.h, with a `count`.
template <class PlanType, class Arguments, class Refusals>
class ExpertOperator {
 public:
  ExpertOperator(const ExpertOperator&) = delete;
  ExpertOperator& operator=(const ExpertOperator&) = delete;

  /// The first failure that has broken the operator: kTimeout, kAborted, kLimitExceeded (launches).
  /// Does not wait.
  Status status() const { return frame_.status(); }
  /// What the next launches show with them: Progress::tag.
  void set_tag(std::uint64_t tag) { arguments_.frame.host.told.tag = tag; }
  /// This rank's.
  ShardRange experts() const { return experts_of(plan_.shape.experts, world()); }
  const PlanType& plan() const { return plan_; }
  const RoleBlocks& blocks() const { return arguments_.launch.blocks; }
  /// OperatorFrame::partition_steps
  std::vector<PartitionStep> partition_steps() const { return frame_.partition_steps(); }
  /// How far a launch has come that does not end: for users.
  std::string progress() const { return frame_.progress(arguments_.launch); }

 protected:
  ExpertOperator(const char* op, const PlanType& plan) : plan_(plan), op_(op), frame_(op) {
    arguments_.launch.plan = plan;
  }
  ~ExpertOperator() {
    const OnDevice on_device(frame_.device());
    cudaFreeHost(refusals_);
  }

  /// Checks the context and the plan's tiles, deals out the blocks, and makes room for refusals.
  /// `problem`: its op, shape and result; the rest follows from the plan. `largest`: a launch's
  /// work, at most. `m`: Launch::m.
  Status start(plan::Problem& problem, const LaunchWork& largest, const PolledFlags& flags,
               const RankContext& context, const CudaOptions& options, std::uint32_t m) {
    const World& of = context.world;
    problem.nodes = of.nodes;
    problem.locals = of.locals;
    problem.experts = {plan_.shape.experts, plan_.shape.top_k};
    problem.dtype = plan_.dtype;
    problem.ranks_per_device = options.ranks_per_device;
    MK_RETURN_IF_ERROR(check_context(op_, plan_.nodes, plan_.locals, plan_.flag_count(),
                                     std::max(1u, options.send_groups.count()), context));
    MK_ASSIGN_OR_RETURN(job_, job_plan_of(options));
    const auto groups = plan::chosen_groups(problem, job_->machine, largest, options.rates);
    auto& launch = arguments_.launch;
    MK_RETURN_IF_ERROR(frame_.start(context, options, accounted_needs(problem, groups), flags,
                                    launch, arguments_.frame));
    launch.m = m;
    void* memory = nullptr;
    MK_RETURN_IF_ERROR(frame_.check(
        cudaHostAlloc(&memory, sizeof(Refusals), cudaHostAllocMapped | cudaHostAllocPortable),
        "pinned memory"));
    launch.refusals = refusals_ = new (memory) Refusals;
    b_layout_ = options.b_layout;
    return {};
  }
  /// Launches are predicted by it. `candidate`: its warpgroups; after `start`.
  void account_for(const plan::Problem& problem, plan::Candidate candidate,
                   const CudaOptions& options) {
    candidate.compute_blocks = blocks().compute;
    account_ = plan::account_of(problem, job_->machine, candidate, options.rates);
  }
  /// What people are told: the product's width and depth, and where the device counts row tiles.
  void tell(std::uint32_t n, std::uint32_t k, const std::uint32_t* row_tiles) {
    LaunchTold& told = arguments_.frame.host.told;
    std::ranges::copy(std::array{n, k, plan_.shape.experts, plan_.shape.top_k}, told.sizes);
    told.tiles_of = row_tiles;
    told.tiles_each = arguments_.columns;
    told.planned = true;
  }

  /// See OperatorFrame.
  void engines_outlast_launches() { frame_.engines_outlast_launches(); }
  /// kUnsupported: the plan's tiles are higher than the kernel's.
  Status check_tile_rows(int most) const {
    if (plan_.tile_m <= static_cast<std::uint32_t>(most)) return {};
    return fail(ErrorCode::kUnsupported, "{}: tiles of {} rows: the kernel's have at most {}", op_,
                plan_.tile_m, most);
  }
  Status check_tokens(std::uint32_t count) const {
    if (count <= plan_.shape.tokens_max) return {};
    return fail(ErrorCode::kInvalidArgument,
                "{}: {} tokens are not in 0 to {}, which the operator was made for", op_, count,
                plan_.shape.tokens_max);
  }
  struct Address {
    const char* name;
    const void* address;
    bool needed;
    std::uintptr_t step;  ///< a multiple of so many bytes
  };
  /// kInvalidArgument names the first that is needed and null, or not at a multiple of its step.
  Status check_addresses(std::initializer_list<Address> all) const {
    for (const Address& one : all) {
      if (!one.needed) continue;
      if (one.address == nullptr)
        return fail(ErrorCode::kInvalidArgument, "{}: {} is null", op_, one.name);
      if (reinterpret_cast<std::uintptr_t>(one.address) % one.step != 0) {
        return fail(ErrorCode::kInvalidArgument,
                    "{}: the address of {}, {}, must be a multiple of {} bytes", op_, one.name,
                    fmt::ptr(one.address), one.step);
      }
    }
    return {};
  }

  /// Puts the launch of `count` tokens on the stream, with what is in the arguments besides these.
  /// `deal()`: gives the launch's groups that stream the roles that they have in turn.
  template <class Kernel, class Deal>
  Status enqueue(cudaStream_t stream, const Kernel& kernel, std::uint32_t count,
                 const LaunchWork& work, Mode mode, Deal&& deal) {
    const Estimate expected = account_.expected(work);
    arguments_.launch.mode = mode == Mode::kAuto ? expected.cheaper() : mode;
    frame_.choose_blocks(stream, alike_count(count), arguments_.launch.mode,
                         arguments_.launch.blocks, arguments_.frame);
    deal();
    arguments_.frame.host.told.m = count;
    MK_RETURN_IF_ERROR(frame_.put_on(stream, kernel, arguments_));
    queued_ = {count, arguments_.launch.mode, expected};
    return {};
  }
  /// Waits for the stream, then answers what the last launch did, or the first failure. Where a
  /// launch since the last call was refused, `refusal(refusals)` makes the error.
  template <class Refusal>
  Result<LaunchStats> finish_launches(cudaStream_t stream, Refusal&& refusal) {
    MK_ASSIGN_OR_RETURN(LaunchStats stats, frame_.finish(stream));
    const std::uint32_t count = shm::load_acquire(&refusals_->count);
    if (count != refused_) {
      refused_ = count;
      return tl::unexpected<Error>(refusal(*refusals_));
    }
    stats.m = queued_.m;
    stats.mode = queued_.mode;
    stats.estimate = queued_.estimate;
    return stats;
  }

  const World& world() const { return arguments_.launch.context.world; }
  kernels::BLayout b_layout() const { return b_layout_; }
  std::uint32_t queued_tokens() const { return queued_.m; }
  const OperatorFrame& frame() const { return frame_; }

  const PlanType plan_;
  Arguments arguments_;

 private:
  struct Form {
    std::uint32_t m = 0;
    Mode mode = Mode::kFused;
    Estimate estimate;
  };

  const char* const op_;
  OperatorFrame frame_;
  std::shared_ptr<const plan::JobPlan> job_;
  plan::Account account_;
  kernels::BLayout b_layout_ = kernels::BLayout::kNK;
  Form queued_;                   ///< of the last launch on a stream
  Refusals* refusals_ = nullptr;  ///< in memory of the host that the GPU can write
  std::uint32_t refused_ = 0;     ///< of them, told by finish_launches
};

}  // namespace mk::kernels::cuda
