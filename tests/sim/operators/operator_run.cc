#include "tests/sim/operators/operator_run.h"

#include <algorithm>

#include "kernels/comm/wait_text.h"
#include "kernels/comm/workspace_head.h"

namespace mk::sim {
namespace {

using kernels::Launch;
using kernels::Role;
using kernels::RoleThread;

/// A deadline in virtual time: longer than any launch, shorter than the jump when nobody can go on.
constexpr std::uint64_t kDeadlineNs = 100'000'000'000'000;

/// An ordinary one: the first launch sends idle flags again (refresh_due in comm/banks.h), as one
/// in 128 or more does.
constexpr std::uint32_t kEpoch = 3;

bool brings(Role role) { return role == Role::kShare || role == Role::kReceive; }

/// Runs one launch.
class LaunchOfAll {
 public:
  LaunchOfAll(OperatorRun& op, const RunSetup& setup, const Costs& costs)
      : op_(op),
        setup_(setup),
        costs_(costs),
        threads_(setup.simulated_ranks()),
        cluster_(threads_,
                 {setup.problem.nodes, setup.problem.locals, setup.mirrored, op.workspace_bytes(),
                  op.flag_count(), std::max(1u, setup.blocks.send.count()), 10, kEpoch - 1},
                 costs, op.numbers()),
        states_(setup.simulated_ranks()) {}

  Result<RunOutcome> run() {
    for (std::uint32_t rank = 0; rank < states_.size(); ++rank) begin(rank);
    threads_.on_switch([this](std::uint32_t rank) { after_switch(rank); });
    const bool ended = threads_.run();
    if (!cluster_.complaint().empty())
      return fail(ErrorCode::kInternal, "{}: {}", op_.name(), cluster_.complaint());
    for (std::uint32_t rank = 0; rank < states_.size(); ++rank) {
      if (!states_[rank].local.stop) continue;
      return tl::unexpected(kernels::describe(states_[rank].local.failure, op_.name(), kEpoch,
                                              op_.launch(rank).context.world, 0));
    }
    if (!ended) return fail(ErrorCode::kInternal, "{}: nobody can go on", op_.name());
    RunOutcome outcome;
    for (const RankState& state : states_) outcome.us = std::max(outcome.us, state.end_us);
    outcome.network_bytes = cluster_.bytes_of(0);
    outcome.commands = cluster_.commands_of(0);
    for (std::uint32_t rank = 0; rank < states_.size(); ++rank)
      outcome.commands_all += cluster_.commands_of(rank);
    return outcome;
  }

 private:
  void begin(std::uint32_t rank) {
    RankState& state = states_[rank];
    Launch& launch = op_.launch(rank);
    launch.context = cluster_.context(rank);
    launch.blocks = setup_.blocks;
    launch.local = &state.local;
    launch.control.stop = &state.local.stop;
    launch.control.record = &state.local.failure;
    launch.control.timeout_ns = kDeadlineNs;
    launch.epoch = kEpoch;
    launch.mode = kernels::Mode::kFused;
    op_.begin(rank);
    kernels::announce_end(launch.context, kEpoch - 1);
    kernels::announce_launch(launch);
    for (const RoleThread& thread : op_.threads(launch.context.world)) {
      state.running += 1;
      state.computing += thread.role == Role::kCompute ? 1 : 0;
      state.sharing += thread.role == Role::kShare ? 1 : 0;
      state.bringing += brings(thread.role) ? 1 : 0;
      threads_.add(rank, [this, rank, thread] { run_thread(rank, thread); });
    }
  }
  void run_thread(std::uint32_t rank, const RoleThread& thread) {
    RankState& state = states_[rank];
    const auto run = [&](Role role) {
      kernels::BlockTotals totals;
      return op_.run_role(rank, role, thread.index, totals, threads_, state, costs_);
    };
    const bool first = run(thread.role);
    if (thread.role == Role::kCompute) --state.computing;
    if (thread.role == Role::kShare) --state.sharing;
    if (brings(thread.role)) --state.bringing;
    if (first && thread.then) run(*thread.then);
    if (--state.running == 0) state.end_us = threads_.now_us();
  }
  void after_switch(std::uint32_t rank) {
    cluster_.take(rank);
    RankState& state = states_[rank];
    if (state.stored == RankState::Stored::kForRank) threads_.wake(rank);
    if (state.stored == RankState::Stored::kForNode) {
      const std::uint32_t locals = setup_.problem.locals;
      const std::uint32_t first = rank / locals * locals;
      for (std::uint32_t i = first; i < first + locals; ++i) threads_.wake(i);
    }
    state.stored = RankState::Stored::kNothing;
  }

  OperatorRun& op_;
  const RunSetup& setup_;
  const Costs& costs_;
  VirtualThreads threads_;
  VirtualCluster cluster_;
  std::vector<RankState> states_;
};

}  // namespace

void add_gather_numbers(const kernels::GatherGeometry& gather, NodeNumbers& numbers, bool whole) {
  if (gather.nodes == 1) return;
  numbers.flags.push_back({gather.nodes, gather.banks, gather.chunks_max, gather.first_flag});
  numbers.regions.push_back({gather.layout.slots, gather.layout.slot_bytes, gather.banks,
                             gather.kind == kernels::GatherKind::kBroadcast
                                 ? ReceiveRegion::Planes::kRanks
                                 : ReceiveRegion::Planes::kNodes,
                             whole});
}

Result<RunOutcome> run_launch(OperatorRun& op, const RunSetup& setup, const Costs& costs) {
  return LaunchOfAll(op, setup, costs).run();
}

}  // namespace mk::sim
