#include "kernels/cpu/launch_runner.h"

#include <algorithm>
#include <utility>

#include "kernels/comm/operator_block.h"
#include "kernels/comm/plan_tools.h"
#include "kernels/comm/turn_text.h"
#include "kernels/comm/wait_text.h"
#include "kernels/comm/workspace_head.h"
#include "kernels/comm/workspace_turn.h"
#include "kernels/cpu/attention_math.h"
#include "kernels/cpu/pacer.h"
#include "kernels/plan/account.h"

namespace mk::kernels {
namespace {

/// The launching thread, as a block that only waits.
struct WaitingExecutor : CpuPacer {
  void stores_done() {}
  void loads_begin() {}
};

/// Shows that the launching thread waits.
class ShownWaits {
 public:
  explicit ShownWaits(shm::Progress* progress)
      : shown_{progress, static_cast<std::uint32_t>(Role::kCollect)} {
    totals.waits.shown = &shown_;
    shown_.begin();
  }
  ~ShownWaits() { shown_.end(); }
  ShownWaits(const ShownWaits&) = delete;
  ShownWaits& operator=(const ShownWaits&) = delete;

  BlockTotals totals;

 private:
  shm::BlockProgress shown_;
};

const plan::Machine& machine_of(const CpuOptions& options) {
  return options.machine != nullptr ? *options.machine : plan::cpu_here();
}

}  // namespace

MachineRates rank_rates(const CpuOptions& options, const World& world, double block_flops_per_s) {
  return plan::rank_rates(machine_of(options), options.rates,
                          {world.locals, options.blocks.compute, block_flops_per_s});
}

MachineRates rank_rates(const CpuOptions& options, const World& world, GemmPath path) {
  const plan::Machine& machine = machine_of(options);
  if (path == GemmPath::kOrdered) return rank_rates(options, world, attention_math().flops_per_s);
  return rank_rates(
      options, world,
      1e9 * (path == GemmPath::kNative ? machine.cpu_gflops : machine.cpu_f32_gflops));
}

Status check_options(const std::string& op, const CpuOptions& options) {
  const RoleBlocks& blocks = options.blocks;
  for (std::uint32_t count :
       {blocks.compute.count(), blocks.reduce.count(), blocks.send.count(), blocks.receive.count(),
        blocks.share.count(), blocks.pull.count(), blocks.plan.count()}) {
    if (count >= 1 && count <= kBlocksMax) continue;
    return fail(ErrorCode::kInvalidArgument,
                "{}: {} blocks of one role are not possible; 1 to {} are", op, count, kBlocksMax);
  }
  if (blocks.send > shm::kLanesMax) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: {} send blocks are too many; a session has at most {} lanes", op, blocks.send,
                shm::kLanesMax);
  }
  MK_RETURN_IF_ERROR(plan::check_rates(op, options.rates));
  if (options.wait_timeout <= std::chrono::nanoseconds::zero())
    return fail(ErrorCode::kInvalidArgument, "{}: the wait timeout must be more than zero", op);
  return {};
}

void add_role(std::vector<RoleThread>& threads, Role role, std::uint32_t count,
              std::optional<Role> then) {
  for (std::uint32_t i = 0; i < count; ++i) threads.push_back({role, i, then});
}

LaunchRunner::LaunchRunner(std::string op, Launch& launch, RoleBody& body,
                           const CpuOptions& options)
    : op_(std::move(op)), launch_(launch), body_(body), progress_(options.progress) {
  const RankContext& context = launch.context;
  launch.local = &local_;
  WaitControl& control = launch.control;
  control.session_abort = context.session_abort;
  control.process_abort = context.process_abort;
  control.peer_failed = reinterpret_cast<std::uint32_t*>(context.workspaces[context.world.local] +
                                                         WorkspaceHead::failed());
  control.stop = &local_.stop;
  control.record = &local_.failure;
  control.timeout_ns = static_cast<std::uint64_t>(options.wait_timeout.count());
}

Status LaunchRunner::start(std::vector<RoleThread> threads) {
  threads_ = std::move(threads);
  reports_.resize(threads_.size());
  MK_ASSIGN_OR_RETURN(pool_, BlockPool::start(static_cast<std::uint32_t>(threads_.size())));
  return {};
}

Status LaunchRunner::ready() const {
  if (broken_) return tl::unexpected<Error>(*broken_);
  if (launch_.epoch < kLaunchesMax) return {};
  return fail(ErrorCode::kLimitExceeded,
              "{}: {} launches are all that one operator makes; create a new one", op_,
              kLaunchesMax);
}

Result<LaunchStats> LaunchRunner::run(std::uint32_t m, Mode mode, const Estimate& estimate) {
  MK_RETURN_IF_ERROR(ready());
  const std::uint64_t start_ns = CpuPacer::now_ns();
  ++launch_.epoch;
  launch_.m = m;
  launch_.mode = mode == Mode::kAuto ? estimate.cheaper() : mode;
  if (adaptive_ != nullptr) {
    adaptive_->choose(height(), launch_.mode == Mode::kFused, start_ns, launch_.blocks);
    threads_ = threads_of_(launch_.blocks, launch_.context.world);
  }
  body_.begin_launch();
  for (Report& report : reports_) {
    report.completed = false;
    for (int part = 0; part < 2; ++part) {
      report.totals[part] = {};
      report.end_ns[part] = start_ns;
      if (trace_capacity_ == 0) report.spans[part] = {};
      report.logs[part] = {report.spans[part].data(), trace_capacity_, 0};
      if (trace_capacity_ != 0) report.totals[part].waits.trace = &report.logs[part];
      report.totals[part].waits.shown = progress_ != nullptr ? &report.shown[part] : nullptr;
    }
  }
  if (progress_ != nullptr) show_launch();
  if (const WorkspaceShare* const shared = launch_.context.shared) {
    WorkspaceTurn* const turn = shared->turn;
    if (const std::uint32_t failed = shm::load_acquire(&turn->failed))
      return broken_by(describe_shared_failure(*turn, failed - 1, op_));
    launch_.context.workspace_handle = turn->context.workspace_handle;  // it may have grown
    if (!await_turn()) return broken_by(describe_turn(*turn, launch_, op_));
  }
  if (!await_records_free()) return broken_by(cause());
  announce_launch(launch_);
  const std::uint64_t begin_ns = CpuPacer::now_ns();
  pool_->run(*this);
  const bool completed = std::all_of(reports_.begin(), reports_.end(),
                                     [](const Report& report) { return report.completed; });
  if (!completed) return broken_by(cause());
  announce_end(launch_);
  if (adaptive_ != nullptr) adaptive_->measured(CpuPacer::now_ns() - begin_ns);
  return make_stats(start_ns, estimate);
}

void LaunchRunner::run_block(std::uint32_t index) {
  const RoleThread& thread = threads_[index];
  Report& report = reports_[index];
  report.completed = run_part(thread.role, thread.index, report, 0);
  if (!thread.then || !report.completed) return;
  report.completed = run_part(*thread.then, thread.index, report, 1);
}

bool LaunchRunner::run_part(Role role, std::uint32_t index, Report& report, int part) {
  shm::BlockProgress& shown = report.shown[part];
  shown = {progress_, static_cast<std::uint32_t>(role)};
  shown.begin();
  const bool completed = body_.run_role(role, index, report.totals[part]);
  shown.end();
  report.end_ns[part] = CpuPacer::now_ns();
  return completed;
}

void LaunchRunner::show_launch() {
  const LaunchTasks tasks = body_.tasks();
  shm::store_relaxed(&progress_->op, shm::progress_operator(op_));
  shm::store_relaxed(&progress_->epoch, launch_.epoch);
  shm::store_relaxed(&progress_->tag, tag_);
  shm::store_relaxed(&progress_->m, height());
  for (std::uint32_t i = 0; i < shm::kProgressSizes; ++i)
    shm::store_relaxed(&progress_->sizes[i], tasks.sizes[i]);
  shm::store_relaxed(&progress_->tiles, tasks.tiles);
  shm::store_relaxed(&progress_->chunks, tasks.chunks);
  shm::store_relaxed(&progress_->tiles_done, 0u);
  shm::store_relaxed(&progress_->chunks_done, 0u);
}

bool LaunchRunner::await_records_free() {
  WaitingExecutor executor;
  ShownWaits shown(progress_);
  OperatorBlock<WaitingExecutor> block(executor, launch_, Role::kCompute, 0, shown.totals);
  for (std::uint32_t local = 0; local < launch_.context.world.locals; ++local) {
    if (!block.await_finished(local, launch_.epoch - kLaunchRecordBanks)) return false;
  }
  return true;
}

bool LaunchRunner::await_turn() {
  WaitingExecutor executor;
  ShownWaits shown(progress_);
  return take_turn(executor, launch_, *launch_.context.shared->turn, shown.totals.waits);
}

Error LaunchRunner::cause() const {
  if (local_.failure.claimed == 0) {
    if (Status status = body_.role_error(); !status) return status.error();
  }
  Error error = describe(local_.failure, op_, launch_.epoch, launch_.context.world,
                         shm::load_acquire(launch_.control.peer_failed));
  const WorkspaceShare* const shared = launch_.context.shared;
  if (shared != nullptr && local_.failure.end == WaitEnd::kTimeout)
    error.message += text_of_other_launches(*shared->turn, shared->sharer);
  return error;
}

tl::unexpected<Error> LaunchRunner::broken_by(const Error& error) {
  broken_ = error;
  const WorkspaceShare* const shared = launch_.context.shared;
  if (shared != nullptr && shared->turn->failed == 0)
    shm::store_release(&shared->turn->failed, shared->sharer + 1);
  announce_failure(launch_.context);
  return tl::unexpected<Error>(error);
}

LaunchStats LaunchRunner::make_stats(std::uint64_t start_ns, const Estimate& estimate) const {
  LaunchStats stats;
  stats.epoch = launch_.epoch;
  stats.m = launch_.m;
  stats.mode = launch_.mode;
  stats.estimate = estimate;
  const auto account = [&](Role role, const BlockTotals& totals, std::uint64_t end_ns) {
    RoleStats& of_role = stats.roles[static_cast<std::uint32_t>(role)];
    ++of_role.blocks;
    of_role.end_ns = std::max(of_role.end_ns, end_ns - start_ns);
    of_role.wait_ns += totals.waits.ns;
    of_role.waits += totals.waits.count;
    stats.commands += totals.commands;
    stats.network_bytes += totals.network_bytes;
  };
  for (std::size_t i = 0; i < threads_.size(); ++i) {
    const RoleThread& thread = threads_[i];
    account(thread.role, reports_[i].totals[0], reports_[i].end_ns[0]);
    if (thread.then) account(*thread.then, reports_[i].totals[1], reports_[i].end_ns[1]);
  }
  if (partition_ != nullptr) stats.partition = partition_->stats();
  if (adaptive_ != nullptr) stats.partition = adaptive_->stats();
  stats.gemm_ns = stats.role(Role::kCompute).end_ns;
  stats.total_ns = CpuPacer::now_ns() - start_ns;
  return stats;
}

std::uint32_t LaunchRunner::height() const {
  const std::uint32_t rows = body_.height();
  return rows != 0 ? rows : launch_.m;
}

std::vector<PartitionStep> LaunchRunner::partition_steps() const {
  if (partition_ != nullptr) return partition_->steps();
  if (adaptive_ == nullptr) return {};
  return {adaptive_->step()};
}

void LaunchRunner::set_trace(std::uint32_t capacity) {
  trace_capacity_ = capacity;
  for (Report& report : reports_) {
    for (auto& spans : report.spans) spans.resize(std::max<std::size_t>(spans.size(), capacity));
  }
}

std::vector<TraceEvent> LaunchRunner::trace() const {
  std::vector<TraceEvent> events;
  for (std::size_t i = 0; i < threads_.size(); ++i) {
    for (int part = 0; part < 2; ++part) {
      const TraceLog& log = reports_[i].logs[part];
      const Role role = part == 0 ? threads_[i].role : threads_[i].then.value_or(threads_[i].role);
      for (std::uint32_t span = 0; span < std::min(log.count, log.capacity); ++span)
        events.push_back({role, threads_[i].index, reports_[i].spans[part][span]});
    }
  }
  return events;
}

}  // namespace mk::kernels
