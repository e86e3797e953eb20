/// \file
/// One launch of an operator by all its ranks in virtual time: the real roles (kernels/ops), as the
/// CPU executor and the interleaving tests run them, over VirtualCluster.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cpu/launch_runner.h"
#include "kernels/gather/geometry.h"
#include "kernels/plan/candidate.h"
#include "tests/sim/operators/virtual_cluster.h"
#include "tests/sim/operators/virtual_executor.h"

namespace mk::sim {

/// The launch to simulate.
struct RunSetup {
  kernels::plan::Problem problem;
  kernels::plan::Candidate candidate;
  kernels::RoleBlocks blocks;
  bool mirrored = false;
  std::uint64_t routing_seed = 1;
  std::uint32_t simulated_nodes() const { return mirrored ? 1 : problem.nodes; }
  std::uint32_t simulated_ranks() const { return simulated_nodes() * problem.locals; }
};

/// The operator of all ranks; one kind for each operator.
class OperatorRun {
 public:
  virtual ~OperatorRun() = default;
  virtual const char* name() const = 0;
  virtual std::uint64_t workspace_bytes() const = 0;
  virtual std::uint32_t flag_count() const = 0;
  virtual NodeNumbers numbers() const = 0;
  /// The rank's launch, with its geometry set.
  virtual kernels::Launch& launch(std::uint32_t rank) = 0;
  virtual std::vector<kernels::RoleThread> threads(const kernels::World& world) const = 0;
  /// The launch's context, m and epoch are set.
  virtual void begin(std::uint32_t rank) = 0;
  virtual bool run_role(std::uint32_t rank, kernels::Role role, std::uint32_t index,
                        kernels::BlockTotals& totals, VirtualThreads& threads, RankState& state,
                        const Costs& costs) = 0;
};

/// Its plan, and the launch of every simulated rank.
template <class Plan, class OperatorLaunch>
class PlannedRun : public OperatorRun {
 public:
  std::uint64_t workspace_bytes() const override {
    if constexpr (requires(const Plan& plan) { plan.workspace_bytes(); })
      return plan_.workspace_bytes();
    else
      return plan_.workspace_bytes;
  }
  std::uint32_t flag_count() const override { return plan_.flag_count(); }
  kernels::Launch& launch(std::uint32_t rank) override { return launches_[rank]; }

 protected:
  PlannedRun(const RunSetup& setup, const Plan& plan, std::uint32_t banks, std::uint32_t m)
      : setup_(setup), plan_(plan), launches_(setup.simulated_ranks()) {
    for (OperatorLaunch& launch : launches_) {
      launch.plan = plan_;
      launch.banks = banks;
      launch.m = m;
    }
  }

  const RunSetup setup_;
  const Plan plan_;
  std::vector<OperatorLaunch> launches_;
};

/// Where a gather's flags and what arrives with them are. `whole`: see ReceiveRegion.
void add_gather_numbers(const kernels::GatherGeometry& gather, NodeNumbers& numbers,
                        bool whole = false);

/// Errors: what the operator's plan refuses; kUnsupported.
Result<std::unique_ptr<OperatorRun>> make_sum_run(const RunSetup& setup,
                                                  kernels::plan::MachineKind kind);
Result<std::unique_ptr<OperatorRun>> make_gather_run(const RunSetup& setup,
                                                     kernels::plan::MachineKind kind);
Result<std::unique_ptr<OperatorRun>> make_expert_run(const RunSetup& setup,
                                                     kernels::plan::MachineKind kind);

/// A simulated launch's results.
struct RunOutcome {
  double us = 0;                    ///< until the last simulated rank has ended
  std::uint64_t network_bytes = 0;  ///< sent by the first rank
  std::uint64_t commands = 0;
  std::uint64_t commands_all = 0;  ///< of all simulated ranks
};
/// An error names the first wait that nobody ended, or a breach of the contract.
Result<RunOutcome> run_launch(OperatorRun& op, const RunSetup& setup, const Costs& costs);

}  // namespace mk::sim
