/// \file
/// The frame of every operator on the CPU: its blocks as threads, its epochs, what becomes of it
/// after a failure, and the statistics. The operator brings what a block does.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/comm/block.h"
#include "kernels/comm/launch.h"
#include "kernels/comm/launch_stats.h"
#include "kernels/comm/launch_work.h"
#include "kernels/comm/trace_event.h"
#include "kernels/comm/types.h"
#include "kernels/comm/world.h"
#include "kernels/cpu/adaptive_threads.h"
#include "kernels/cpu/block_pool.h"
#include "kernels/cpu/cpu_gemm.h"
#include "kernels/cpu/partition_board.h"
#include "shm/host/result.h"
#include "shm/progress.h"

namespace mk::kernels {

namespace plan {
struct Machine;
}

/// A rank chooses these for itself, of any operator; ranks may differ. (What they must agree on is
/// the operator's plan.)
struct CpuOptions {
  RoleBlocks blocks;
  /// How long one wait may take. Waits for what others derive from third ranks get up to half as
  /// much again, so that the rank next to the cause reports first.
  std::chrono::nanoseconds wait_timeout = std::chrono::seconds(30);
  /// What the planner goes by in the machine's place; 0: as the machine file says.
  MachineRates rates;
  /// Null: plan::cpu_here().
  std::shared_ptr<const plan::Machine> machine;
  /// Where people read how far a launch is: SegmentHeader::progress. Null: nowhere.
  shm::Progress* progress = nullptr;
  /// A row's bits do not depend on how many rows there are: products are GemmPath::kOrdered.
  bool batch_invariant = false;
  /// Threads that compute and threads that communicate within the node do each other's tasks in
  /// fused launches (adaptive_roles.h), or go over to each other's roles between launches
  /// (adaptive_threads.h). The bits stay.
  bool adaptive = false;
};

/// Of an operator with one B of the caller's.
struct GemmCpuOptions : CpuOptions {
  BLayout b_layout = BLayout::kKN;
  /// Those that sum fill in LaunchStats::nonfinite_partials, which takes another look at all that
  /// they add.
  bool count_nonfinite = false;
};

/// What the planner takes of this rank: the options' rates and machine, for its compute threads.
/// Each multiplies by `path`, or has so many `block_flops_per_s`.
MachineRates rank_rates(const CpuOptions& options, const World& world, GemmPath path);
MachineRates rank_rates(const CpuOptions& options, const World& world, double block_flops_per_s);

/// `op` names the operator. kInvalidArgument.
Status check_options(const std::string& op, const CpuOptions& options);

/// One rank's launch, as people are told of it (shm::Progress).
struct LaunchTasks {
  std::uint32_t tiles = 0;   ///< to compute; 0: not known before its blocks run (tell_tiles)
  std::uint32_t chunks = 0;  ///< to send to other nodes; 0: likewise (tell_chunks), or none
  std::array<std::uint32_t, shm::kProgressSizes> sizes{};  ///< shm::kProgressSizeNames
};

/// What the blocks run.
class RoleBody {
 public:
  /// Block `index` of `role`, on its own thread. False: it did not reach its end; why is in
  /// LocalWords::failure or in `role_error`. Must not throw.
  virtual bool run_role(Role role, std::uint32_t index, BlockTotals& totals) = 0;
  /// Before a launch's blocks, when its m and its form are settled. Must not throw.
  virtual void begin_launch() {}
  /// What this rank has to do in the launch that has been begun, as far as it is known by then.
  virtual LaunchTasks tasks() const { return {}; }
  /// The rows of the launch that comes, as the caller counts them; 0: its m.
  virtual std::uint32_t height() const { return 0; }
  /// A failure of the arithmetic, which no wait has recorded.
  virtual Status role_error() const { return {}; }

 protected:
  ~RoleBody() = default;
};

/// An operator's launch before its first; LaunchRunner fills in the rest.
template <class OperatorLaunch, class Plan>
OperatorLaunch make_launch(const Plan& plan, const RankContext& context, const RoleBlocks& blocks,
                           std::uint32_t banks) {
  OperatorLaunch launch;
  launch.plan = plan;
  launch.context = context;
  launch.blocks = blocks;
  launch.banks = banks;
  return launch;
}

/// A thread of the pool: `index` of `role`, and after it the same index of `then`.
struct RoleThread {
  Role role = Role::kCompute;
  std::uint32_t index = 0;
  std::optional<Role> then;
};
/// Adds threads 0 .. count - 1 of a role.
void add_role(std::vector<RoleThread>& threads, Role role, std::uint32_t count,
              std::optional<Role> then = std::nullopt);

/// Owned by an operator; not thread-safe.
class LaunchRunner : private BlockWork {
 public:
  /// `launch` (with its context and blocks set) and `body` outlive the runner, which fills in
  /// `launch`'s other common fields.
  LaunchRunner(std::string op, Launch& launch, RoleBody& body, const CpuOptions& options);
  virtual ~LaunchRunner() = default;

  /// Starts the threads. Once, before the first launch.
  Status start(std::vector<RoleThread> threads);

  /// Ok while the operator can launch; else what broke it, or that its launches are spent.
  Status ready() const;
  /// The next launch: epoch + 1, all blocks, and back when they have ended. After an error every
  /// later call answers the same one. `estimate`: what kAuto goes by.
  Result<LaunchStats> run(std::uint32_t m, Mode mode, const Estimate& estimate = {});
  /// Breaks the operator for a reason outside the blocks, and tells the local ranks.
  tl::unexpected<Error> broken_by(const Error& error);

  /// Whether the next launches keep their spans: `capacity` of each block; 0: none. The last
  /// launch's stay until then.
  void set_trace(std::uint32_t capacity);
  /// Of the last launch.
  std::vector<TraceEvent> trace() const;
  /// By one block of a launch that has found out how many tiles there are.
  void tell_tiles(std::uint32_t tiles) {
    if (progress_ != nullptr) shm::store_relaxed(&progress_->tiles, tiles);
  }
  /// Likewise the chunks.
  void tell_chunks(std::uint32_t chunks) {
    if (progress_ != nullptr) shm::store_relaxed(&progress_->chunks, chunks);
  }
  /// Statistics and traces then tell of it. It outlives the runner.
  void show_partition(const PartitionBoard& board) { partition_ = &board; }
  /// Launches then have the blocks that `threads` chooses, and their times are told it. It outlives
  /// the runner. `threads_of`: those of any such blocks, as many as have been started.
  void adapt(AdaptiveThreads& threads,
             std::vector<RoleThread> (*threads_of)(const RoleBlocks&, const World&)) {
    adaptive_ = &threads;
    threads_of_ = threads_of;
  }
  /// Targets of the last launch, if its partition is adaptive.
  std::vector<PartitionStep> partition_steps() const;
  /// The caller's mark of the next launches; 0: none.
  void set_tag(std::uint64_t tag) { tag_ = tag; }

 private:
  /// One thread's account of one launch; read after the launch. On lines of its own.
  struct alignas(64) Report {
    BlockTotals totals[2];  ///< of `role`, of `then`
    std::uint64_t end_ns[2] = {};
    std::vector<TraceSpan> spans[2];  ///< what the last launch has left, and room for the next
    TraceLog logs[2];
    shm::BlockProgress shown[2];
    bool completed = false;
  };

  void run_block(std::uint32_t index) override;
  bool run_part(Role role, std::uint32_t index, Report& report, int part);
  void show_launch();
  std::uint32_t height() const;
  bool await_records_free();
  bool await_turn();
  Error cause() const;
  LaunchStats make_stats(std::uint64_t start_ns, const Estimate& estimate) const;

  const std::string op_;
  Launch& launch_;
  RoleBody& body_;
  shm::Progress* const progress_;
  std::uint64_t tag_ = 0;
  std::uint32_t trace_capacity_ = 0;
  const PartitionBoard* partition_ = nullptr;
  AdaptiveThreads* adaptive_ = nullptr;
  std::vector<RoleThread> (*threads_of_)(const RoleBlocks&, const World&) = nullptr;
  LocalWords local_;
  std::vector<RoleThread> threads_;
  std::vector<Report> reports_;
  std::optional<Error> broken_;
  std::unique_ptr<BlockPool> pool_;  ///< ends first: its threads use the rest
};

}  // namespace mk::kernels
