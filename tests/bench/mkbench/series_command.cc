#include <optional>
#include <utility>

#include "shm/files/standard_output.h"
#include "tests/bench/mkbench/command.h"
#include "tests/bench/mkbench/report.h"
#include "tests/bench/mkbench/report_files.h"

namespace mk::bench {
namespace {

/// Several measurements with the same flags, one table, one report.
class SeriesCommand : public Command {
 public:
  SeriesCommand(CLI::App& command, std::string tool, std::string line)
      : command_(command), flags_(command), tool_(std::move(tool)), line_(std::move(line)) {
    command.add_flag("--large", large_, "sizes at which figures mean something");
  }
  bool chosen() const override { return command_.parsed(); }
  void check() const override { flags_.check(); }

 protected:
  /// Before anything is measured: the exit status, if the report cannot be written.
  std::optional<int> open_files() {
    auto files = ReportFiles::open(flags_);
    if (!files) return report_error(files.error(), 2);
    files_ = std::move(*files);
    return std::nullopt;
  }
  /// One measurement: `operation` in the world of `options`.
  Status measure(const std::string& name, const OperatorCase& operation, BenchOptions options) {
    options.spec.op = operation.name();
    options.spec.operation = operation.options();
    if (options.spec.nodes == 1) {
      options.link_bandwidth.clear();
    } else if (options.fabric == "loopback" && options.join_sockets.empty() &&
               options.link_bandwidth.empty()) {
      options.link_bandwidth = kBalanced;
    }
    const std::string what = fmt::format("{}: ", name);
    MK_ASSIGN_OR_RETURN(auto result, run_bench(options, [&](const std::string& text) {
                          show_progress(what + text);
                        }));
    auto json = json_of(options, result);
    json["operator"] = operation.name();
    json["title"] = operation.title();
    measurements_.push_back(std::move(json));
    rows_.push_back({name, std::move(result)});
    return {};
  }

  /// The table, the file, the exit status.
  int finish(const std::string& heading) {
    show_progress("");
    print_summary(heading, rows_);
    bool right = true;
    bool asked = true;
    for (const SummaryRow& row : rows_) {
      right = right && row.result.verification.passed();
      asked = asked && row.result.verification.asked;
    }
    const Status written = files_.write_json(
        document(tool_, line_,
                 {{"measurements", std::move(measurements_)},
                  {"correct", asked ? nlohmann::json(right) : nlohmann::json()}}));
    if (!written) return report_error(written.error());
    return right ? 0 : 1;
  }

  CLI::App& command_;
  RunFlags flags_;
  bool large_ = false;

 private:
  ReportFiles files_;
  std::string tool_, line_;
  std::vector<SummaryRow> rows_;
  nlohmann::json measurements_ = nlohmann::json::array();
};

class AllCommand : public SeriesCommand {
 public:
  AllCommand(CLI::App& app, const std::string& line)
      : SeriesCommand(*app.add_subcommand("all", "every operator in one run, and one table"),
                      "mkbench all", line) {}

  int run() override {
    if (const auto failed = open_files()) return *failed;
    const BenchSpec& spec = flags_.options.spec;
    for (const std::string& name : case_names()) {
      const auto operation = make_case(name);
      if (large_) operation->make_large();
      print_out("{}: {}\n", operation->title(), operation->describe(spec));
      if (const Status done = measure(operation->title(), *operation, flags_.options); !done)
        return report_error(done.error());
    }
    print_out("\n{} nodes x {} ranks, {}; time of a launch: its slowest rank's, medians\n",
              spec.nodes, spec.local, flags_.options.fabric);
    return finish("operator");
  }
};

class ScalingCommand : public SeriesCommand {
 public:
  ScalingCommand(CLI::App& app, const std::string& name, const std::string& line)
      : SeriesCommand(*app.add_subcommand(name, make_case(name)->title()),
                      "mkbench scaling " + name, line),
        operation_(make_case(name)) {
    operation_->add_options(command_);
  }

  int run() override {
    if (const auto failed = open_files()) return *failed;
    const nlohmann::json one_node = operation_->options();
    for (std::uint32_t nodes = 1; nodes <= kNodesMax; ++nodes) {
      operation_->set_options(one_node);
      if (large_) operation_->make_large();
      operation_->keep_work_per_rank(nodes);
      BenchOptions options = flags_.options;
      options.spec.nodes = nodes;
      print_out("{} node{}: {}\n", nodes, nodes == 1 ? "" : "s",
                operation_->describe(options.spec));
      if (const Status done = measure(std::to_string(nodes), *operation_, options); !done)
        return report_error(done.error());
    }
    print_out("\n{}, {} rank{} per node, work per rank fixed; all ranks share this machine\n",
              operation_->title(), flags_.options.spec.local,
              flags_.options.spec.local == 1 ? "" : "s");
    return finish("nodes");
  }

 private:
  static constexpr std::uint32_t kNodesMax = 4;
  std::unique_ptr<OperatorCase> operation_;
};

}  // namespace

std::unique_ptr<Command> make_all_command(CLI::App& app, const std::string& line) {
  return std::make_unique<AllCommand>(app, line);
}

std::unique_ptr<Command> make_scaling_command(CLI::App& app, const std::string& name,
                                              const std::string& line) {
  return std::make_unique<ScalingCommand>(app, name, line);
}

}  // namespace mk::bench
