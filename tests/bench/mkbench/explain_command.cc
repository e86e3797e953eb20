#include <string>

#include "kernels/plan/choose.h"
#include "shm/files/standard_output.h"
#include "shm/limits.h"
#include "tests/bench/mkbench/at_least_one.h"
#include "tests/bench/mkbench/command.h"
#include "tests/bench/mkbench/planned_shapes.h"
#include "tests/bench/mkbench/report_files.h"

namespace mk::bench {
namespace {

namespace plan = kernels::plan;

/// `mkbench explain OPERATOR`: the planner's choice, on a machine that need not be here.
class ExplainCommand : public Command {
 public:
  explicit ExplainCommand(CLI::App& app)
      : command_(*app.add_subcommand(
            "explain", "why a launch runs as it does, and what the next best would cost")) {
    command_.add_option("operator", operator_, "ag-gemm, gemm-rs, gemm-ar, ring, moe or combine")
        ->required()
        ->check(CLI::IsMember({"ag-gemm", "gemm-rs", "gemm-ar", "ring", "moe", "combine"}));
    command_
        .add_option(
            "shape", shape_,
            "MxNxK: m rows (or tokens) of all ranks, n and k as a rank multiplies them, of an "
            "expert's weights; of ring: sequence x query heads x head_dim")
        ->required();
    command_.add_option("--nodes", problem_.nodes, "nodes")
        ->check(CLI::Range(1u, shm::kNodesMax))
        ->capture_default_str();
    command_.add_option("--local", problem_.locals, "ranks of a node, a GPU each")
        ->check(CLI::Range(1u, shm::kLocalRanksMax))
        ->capture_default_str();
    command_.add_option("--machine", machine_, "H100, H200, CPU, or a machine file")
        ->capture_default_str();
    command_.add_option("--tuned", tuned_, "a tuned.json; the shipped choices without");
    command_.add_flag("--model-only", model_only_, "no tuned choice");
    command_
        .add_option("--network-gb-s", network_gb_s_,
                    "a rail's rate; the machine's without (1 GB/s: 8 Gb/s)")
        ->check(more_than_0());
    command_.add_flag("--in-place", problem_.in_place,
                      "AllGather+GEMM: rows lie where the network reads them");
    command_.add_option("--key-heads", problem_.heads.key_heads, "ring: without, as query heads");
    command_.add_option("--batch", problem_.heads.batch, "ring: sequences")->check(at_least_one());
    command_.add_flag("--causal", problem_.heads.causal, "ring: a row sees what is before it");
    add_positive(command_, "--experts", problem_.experts.count, "moe, combine: of all ranks");
    add_positive(command_, "--top-k", problem_.experts.top_k, "moe, combine: experts of a token");
    problem_.experts = {256, 8};
    problem_.locals = 4;
  }

  bool chosen() const override { return command_.parsed(); }
  void check() const override {}

  int run() override {
    const auto text = explained();
    if (!text) return report_error(text.error());
    print_out("{}", *text);
    return 0;
  }

 private:
  Result<std::string> explained() const {
    plan::Problem problem = problem_;
    MK_ASSIGN_OR_RETURN(problem.op, planned_op(operator_));
    MK_ASSIGN_OR_RETURN(problem.shape, parse_shape(shape_));
    MK_ASSIGN_OR_RETURN(plan::Machine machine, machine_named(machine_));
    if (network_gb_s_ > 0) {
      machine.network_gb_s = network_gb_s_;
      machine.cpu_network_in_turns_gb_s = network_gb_s_;
    }
    plan::Tuned tuned = plan::shipped_tuned();
    if (!tuned_.empty()) {
      MK_ASSIGN_OR_RETURN(tuned, plan::load_tuned(tuned_));
    }
    return plan::explain(problem, machine, model_only_ ? nullptr : &tuned);
  }

  CLI::App& command_;
  std::string operator_, shape_;
  plan::Problem problem_;
  std::string machine_ = "H100";
  std::string tuned_;
  bool model_only_ = false;
  double network_gb_s_ = 0;
};

}  // namespace

std::unique_ptr<Command> make_explain_command(CLI::App& app) {
  return std::make_unique<ExplainCommand>(app);
}

}  // namespace mk::bench
