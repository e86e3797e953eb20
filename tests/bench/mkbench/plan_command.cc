#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "kernels/plan/cluster.h"
#include "shm/files/output_file.h"
#include "shm/files/standard_output.h"
#include "shm/limits.h"
#include "tests/bench/mkbench/at_least_one.h"
#include "tests/bench/mkbench/command.h"
#include "tests/bench/mkbench/planned_shapes.h"
#include "tests/bench/mkbench/report.h"
#include "tests/bench/mkbench/report_files.h"

namespace mk::bench {
namespace {

namespace plan = kernels::plan;

const char* name_of(plan::Limit limit) {
  switch (limit) {
    case plan::Limit::kCompute:
      return "compute";
    case plan::Limit::kLocal:
      return "local";
    case plan::Limit::kNetwork:
      return "network";
    case plan::Limit::kLatency:
      break;
  }
  return "latency";
}

double mib(std::uint64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

/// "400Gb/s" or "50GB/s" in GB/s; none: it is no rate.
std::optional<double> rate_gb_s(const std::string& text) {
  char* end = nullptr;
  const double number = std::strtod(text.c_str(), &end);
  const std::string unit(end);
  if (!(number > 0) || !std::isfinite(number)) return std::nullopt;
  if (unit == "Gb/s") return number / 8;
  if (unit == "GB/s") return number;
  return std::nullopt;
}

nlohmann::json json_of(const plan::Problem& problem, const plan::ClusterPlan& made) {
  nlohmann::json row;
  row["nodes"] = problem.nodes;
  row["locals"] = problem.locals;
  row["time_us"] = made.time.total;
  row["bound_us"] = made.bound_us;
  row["share_of_bound"] = made.bound_us / made.time.total;
  row["limit"] = name_of(made.limit);
  row["terms_us"] = {{"launch", made.time.launch},   {"compute", made.time.compute},
                     {"local", made.time.local},     {"passed", made.time.passed},
                     {"network", made.time.network}, {"wait", made.time.wait},
                     {"sums", made.time.sums},       {"last", made.time.last}};
  row["network_bytes_per_rank"] = made.network_bytes;
  row["bytes_per_link"] = made.bytes_per_link;
  row["commands_per_rank"] = made.commands;
  row["queue_pairs_per_node"] = made.queue_pairs;
  row["workspace_bytes_per_rank"] = made.workspace_bytes;
  row["registered_bytes_per_node"] = made.registered_bytes;
  row["arrival_flags_per_rank"] = made.arrival_flags;
  row["way"] = plan::describe(problem, made.choice.candidate);
  row["advice"] = made.advice;
  row["obstacles"] = made.obstacles;
  return row;
}

/// `mkbench plan`: a launch on a cluster that need not be there.
class PlanCommand : public Command {
 public:
  PlanCommand(CLI::App& app, std::string line)
      : command_(*app.add_subcommand("plan", "what a launch on a larger cluster takes and needs")),
        line_(std::move(line)) {
    command_.add_option("--op", operator_, "ag-gemm, gemm-rs, gemm-ar, ring, moe or combine")
        ->required()
        ->check(CLI::IsMember({"ag-gemm", "gemm-rs", "gemm-ar", "ring", "moe", "combine"}));
    command_.add_option("--shape", shape_, "MxNxK, as for explain")->required();
    command_.add_option("--nodes", problem_.nodes, "nodes")
        ->check(CLI::Range(1u, shm::kNodesMax))
        ->capture_default_str();
    command_.add_option("--locals", problem_.locals, "ranks of a node, a GPU each")
        ->check(CLI::Range(1u, shm::kLocalRanksMax))
        ->capture_default_str();
    command_.add_option("--gpu", machine_, "h100, h200, cpu, or a machine file")
        ->capture_default_str();
    command_.add_option("--nic", nic_, "a rail's rate, 400Gb/s or 50GB/s; the machine's without");
    command_.add_flag("--table", table_, "nodes 1, 2, 4, ... 1024");
    command_.add_option("--json", json_path_, "a file for the same in JSON");
    command_.add_flag("--overwrite", overwrite_, "replace that file");
    command_.add_option("--key-heads", problem_.heads.key_heads, "ring: without, as query heads");
    command_.add_flag("--causal", problem_.heads.causal, "ring: a row sees what is before it");
    add_positive(command_, "--experts", problem_.experts.count, "moe, combine: of all ranks");
    add_positive(command_, "--top-k", problem_.experts.top_k, "moe, combine: experts of a token");
    problem_.experts = {256, 8};
    problem_.nodes = 2;
    problem_.locals = 8;
  }

  bool chosen() const override { return command_.parsed(); }
  void check() const override {}

  int run() override {
    const Status done = show();
    return done ? 0 : report_error(done.error());
  }

 private:
  Status show() {
    MK_ASSIGN_OR_RETURN(problem_.op, planned_op(operator_));
    MK_ASSIGN_OR_RETURN(problem_.shape, parse_shape(shape_));
    for (const char* shipped : {"H100", "H200", "CPU"}) {
      if (CLI::detail::to_lower(machine_) == CLI::detail::to_lower(std::string(shipped)))
        machine_ = shipped;
    }
    MK_ASSIGN_OR_RETURN(plan::Machine machine, machine_named(machine_));
    if (!nic_.empty()) {
      const auto rate = rate_gb_s(nic_);
      if (!rate)
        return fail(ErrorCode::kInvalidArgument,
                    "--nic {}: no rate; give one such as 400Gb/s or 50GB/s", nic_);
      machine.network_gb_s = machine.cpu_network_in_turns_gb_s = *rate;
    }
    std::optional<OutputFile> file;
    if (!json_path_.empty()) {
      OutputRules rules;
      rules.option = "--json";
      rules.overwrite = overwrite_;
      MK_ASSIGN_OR_RETURN(auto opened, OutputFile::create(json_path_, std::move(rules)));
      file.emplace(std::move(opened));
    }
    nlohmann::json rows = nlohmann::json::array();
    MK_RETURN_IF_ERROR(table_ ? show_table(machine, rows) : show_one(machine, rows));
    if (!file) return {};
    nlohmann::json body{{"operator", operator_},
                        {"shape", shape_},
                        {"machine", machine.name},
                        {"network_gb_s", machine.network_gb_s},
                        {"plans", rows}};
    MK_RETURN_IF_ERROR(
        file->write(document("mkbench plan", line_, std::move(body)).dump(1) + "\n"));
    return file->publish();
  }

  Status show_one(const plan::Machine& machine, nlohmann::json& rows) const {
    MK_ASSIGN_OR_RETURN(const plan::ClusterPlan made, plan::plan_cluster(problem_, machine));
    rows.push_back(json_of(problem_, made));
    const plan::Timeline& time = made.time;
    print_out(
        "{} {} on {} x {} {}: {:.1f} us predicted, {:.0f}% of the bound ({:.1f} us)\n{}\n\n"
        "  compute {:>20.1f} us\n  within the node {:>12.1f} us\n  network {:>20.1f} us\n"
        "  launch {:>21.1f} us\n\n"
        "  a rank sends {:>15.1f} MiB in {} commands, {:.1f} MiB on a link\n"
        "  workspace {:>18.1f} MiB a rank, {:.1f} MiB registered a node\n"
        "  queue pairs {:>16} a node; arrival flags {} a rank\n\nlimit: {}; {}\n",
        operator_, shape_, problem_.nodes, problem_.locals, machine.name, time.total,
        100 * made.bound_us / time.total, made.bound_us,
        plan::describe(problem_, made.choice.candidate), time.compute, time.local + time.passed,
        time.network, time.launch, mib(made.network_bytes), made.commands, mib(made.bytes_per_link),
        mib(made.workspace_bytes), mib(made.registered_bytes), made.queue_pairs, made.arrival_flags,
        name_of(made.limit), made.advice);
    for (const std::string& obstacle : made.obstacles)
      print_out("not possible today: {}\n", obstacle);
    return {};
  }

  Status show_table(const plan::Machine& machine, nlohmann::json& rows) const {
    constexpr std::uint32_t kNodesMax = 1024;
    print_out("{:>5} {:>12} {:>6} {:>8} {:>12} {:>12} {:>8} {:>12}  {}\n", "nodes", "us", "bound",
              "limit", "MiB a link", "MiB a rank", "QPs", "MiB a node", "today");
    for (std::uint32_t nodes = 1; nodes <= kNodesMax; nodes *= 2) {
      plan::Problem problem = problem_;
      problem.nodes = nodes;
      const auto made = plan::plan_cluster(problem, machine);
      if (!made) {
        rows.push_back({{"nodes", nodes}, {"error", made.error().message}});
        print_out("{:>5} {}\n", nodes, made.error().message);
        continue;
      }
      rows.push_back(json_of(problem, *made));
      print_out("{:>5} {:>12.1f} {:>5.0f}% {:>8} {:>12.2f} {:>12.1f} {:>8} {:>12.1f}  {}\n", nodes,
                made->time.total, 100 * made->bound_us / made->time.total, name_of(made->limit),
                mib(made->bytes_per_link), mib(made->network_bytes), made->queue_pairs,
                mib(made->registered_bytes),
                made->obstacles.empty() ? "yes" : "no: " + made->obstacles.front());
    }
    return {};
  }

  CLI::App& command_;
  std::string line_;
  std::string operator_, shape_, nic_, json_path_;
  std::string machine_ = "h200";
  plan::Problem problem_;
  bool table_ = false;
  bool overwrite_ = false;
};

}  // namespace

std::unique_ptr<Command> make_plan_command(CLI::App& app, const std::string& line) {
  return std::make_unique<PlanCommand>(app, line);
}

}  // namespace mk::bench
