#include "tests/sim/operators/simulate.h"

#include "tests/sim/operators/costs.h"
#include "tests/sim/operators/operator_run.h"

namespace mk::sim {
namespace {

namespace plan = kernels::plan;

/// The blocks of a role that copies or sums share one rate: few stand for all.
constexpr std::uint32_t kRoleThreads = 4;

Result<std::unique_ptr<OperatorRun>> make_run(const RunSetup& setup, plan::MachineKind kind) {
  switch (setup.problem.op) {
    case plan::Op::kGemmAr:
    case plan::Op::kGemmRs:
      return make_sum_run(setup, kind);
    case plan::Op::kAgGemm:
    case plan::Op::kRing:
      return make_gather_run(setup, kind);
    default:
      break;
  }
  return make_expert_run(setup, kind);
}

}  // namespace

Result<Simulated> simulate(const plan::Problem& problem, const plan::Machine& machine,
                           const plan::Candidate& candidate, Nodes nodes,
                           std::uint64_t routing_seed) {
  MK_ASSIGN_OR_RETURN(const Costs costs, costs_of(problem, machine, candidate));
  RunSetup setup;
  setup.problem = problem;
  setup.candidate = candidate;
  setup.routing_seed = routing_seed;
  setup.mirrored = nodes == Nodes::kOne && problem.nodes > 1;
  setup.blocks = {costs.compute_threads, kRoleThreads, 1,           kRoleThreads,
                  kRoleThreads,          kRoleThreads, kRoleThreads};
  MK_ASSIGN_OR_RETURN(const auto run, make_run(setup, machine.kind));
  MK_ASSIGN_OR_RETURN(const RunOutcome outcome, run_launch(*run, setup, costs));
  return Simulated{outcome.us + costs.launch_us, outcome.network_bytes, outcome.commands,
                   outcome.commands_all};
}

}  // namespace mk::sim
