#include "tests/bench/mkbench/command.h"

#include "tests/bench/mkbench/chrome_trace.h"
#include "tests/bench/mkbench/report.h"
#include "tests/bench/mkbench/report_files.h"
#include "tests/bench/mkbench/trace_picture.h"

namespace mk::bench {
namespace {

/// `mkbench OPERATOR`.
class OperatorCommand : public Command {
 public:
  OperatorCommand(CLI::App& app, const std::string& name, const std::string& line)
      : operation_(make_case(name)),
        command_(*app.add_subcommand(
            name, fmt::format("{}: {}", operation_->title(), operation_->help()))),
        flags_(command_),
        line_(line) {
    flags_.options.spec.op = name;
    flags_.add_trace_flags();
    operation_->add_options(command_);
  }

  bool chosen() const override { return command_.parsed(); }
  void check() const override { flags_.check(); }

  int run() override {
    BenchSpec& spec = flags_.options.spec;
    spec.operation = operation_->options();
    spec.trace = !(flags_.trace_path + flags_.picture_path).empty();
    auto files = ReportFiles::open(flags_);
    if (!files) return report_error(files.error(), 2);
    const auto result = run_bench(flags_.options, show_progress);
    show_progress("");
    if (!result) return report_error(result.error());
    print_report(*operation_, flags_.options, *result);
    const Status written = write_files(*files, *result);
    if (!written) return report_error(written.error());
    return result->verification.passed() ? 0 : 1;
  }

 private:
  Status write_files(ReportFiles& files, const BenchResult& result) const {
    const BenchSpec& spec = flags_.options.spec;
    MK_RETURN_IF_ERROR(
        files.write_json(document("mkbench " + spec.op, line_, json_of(flags_.options, result))));
    if (!spec.trace) return {};
    MK_RETURN_IF_ERROR(files.write_trace(chrome_trace(result.traces)));
    const std::string title = fmt::format("{}, {} x {} ranks, {}", operation_->title(), spec.nodes,
                                          spec.local, operation_->describe(spec));
    return files.write_picture(trace_picture(result.traces, title));
  }

  std::unique_ptr<OperatorCase> operation_;
  CLI::App& command_;
  RunFlags flags_;
  std::string line_;
};

}  // namespace

Commands::Commands(CLI::App& app, const std::string& line) {
  for (const std::string& name : case_names())
    commands_.push_back(std::make_unique<OperatorCommand>(app, name, line));
  commands_.push_back(make_all_command(app, line));
  CLI::App& scaling = *app.add_subcommand("scaling", "one operator on 1 to 4 nodes");
  scaling.require_subcommand(1);
  for (const std::string& name : case_names())
    commands_.push_back(make_scaling_command(scaling, name, line));
  commands_.push_back(make_explain_command(app));
  commands_.push_back(make_plan_command(app, line));
  commands_.push_back(make_tune_command(app));
  commands_.push_back(make_calibrate_command(app));
}

void Commands::check() const {
  for (const auto& command : commands_) {
    if (command->chosen()) command->check();
  }
}

int Commands::run() {
  for (const auto& command : commands_) {
    if (command->chosen()) return command->run();
  }
  return 2;
}

}  // namespace mk::bench
