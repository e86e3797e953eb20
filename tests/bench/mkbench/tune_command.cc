#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "kernels/plan/tuned.h"
#include "shm/files/standard_output.h"
#include "tests/bench/mkbench/at_least_one.h"
#include "tests/bench/mkbench/command.h"
#include "tests/bench/mkbench/machine.h"
#include "tests/bench/mkbench/operator_case.h"
#include "tests/bench/mkbench/planned_shapes.h"
#include "tests/bench/mkbench/report_files.h"

namespace mk::bench {
namespace {

namespace plan = kernels::plan;

/// A folder for a search's files, gone with it.
class TemporaryFolder {
 public:
  static Result<TemporaryFolder> create() {
    std::string path = (std::filesystem::temp_directory_path() / "mkbench-tune-XXXXXX").string();
    if (::mkdtemp(path.data()) == nullptr)
      return fail(ErrorCode::kSystem, "no folder can be made at {}", path);
    return TemporaryFolder(std::move(path));
  }
  TemporaryFolder(TemporaryFolder&& other) noexcept : path_(std::exchange(other.path_, {})) {}
  TemporaryFolder& operator=(TemporaryFolder&&) = delete;
  ~TemporaryFolder() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }
  std::string file(const char* name) const { return path_ + "/" + name; }

 private:
  explicit TemporaryFolder(std::string path) : path_(std::move(path)) {}
  std::string path_;
};

/// `mkbench tune OPERATOR SHAPE...`: runs around the model's choice, and the quickest into a
/// tuned.json. A candidate is run as the only tuned choice of its bucket.
class TuneCommand : public Command {
 public:
  explicit TuneCommand(CLI::App& app)
      : command_(*app.add_subcommand(
            "tune", "measure around the planner's choice on GPUs, and write tuned.json")),
        flags_(command_) {
    command_.add_option("operator", operator_, "ag-gemm, gemm-rs or gemm-ar")
        ->required()
        ->check(CLI::IsMember({"ag-gemm", "gemm-rs", "gemm-ar"}));
    command_.add_option("shapes", shapes_, "MxNxK: m of all ranks, n and k of one")->required();
    command_.add_option("--tuned", path_, "the file that gets the choices; others in it stay")
        ->required();
    command_.add_option("--machine", machine_,
                        "a machine file; without it, the one shipped for the GPUs here");
    command_.add_option("--time", seconds_, "s, for each shape")
        ->check(more_than_0())
        ->capture_default_str();
    command_.add_option("--within", within_, "tries what is predicted to take so much longer")
        ->check(at_least_0())
        ->capture_default_str();
  }

  bool chosen() const override { return command_.parsed(); }
  void check() const override {
    flags_.check();
    if (flags_.options.spec.executor != "cuda")
      throw CLI::ValidationError("--executor", "tuned choices are of GPUs: give --executor cuda");
  }

  int run() override {
    const Status tuned = tune_all();
    show_progress("");
    return tuned ? 0 : report_error(tuned.error());
  }

 private:
  Status tune_all() {
    MK_ASSIGN_OR_RETURN(const plan::Op op, planned_op(operator_));
    MK_ASSIGN_OR_RETURN(const plan::Machine machine,
                        machine_to_tune(machine_, describe_machine().at("gpu").get<std::string>()));
    if (machine_.empty()) machine_ = machine.name;
    plan::Tuned tuned;
    if (std::filesystem::exists(path_)) {
      MK_ASSIGN_OR_RETURN(tuned, plan::load_tuned(path_));
    }
    MK_ASSIGN_OR_RETURN(const TemporaryFolder folder, TemporaryFolder::create());
    ::setenv("MKERNEL_MACHINE", machine_.c_str(), 1);
    ::setenv("MKERNEL_TUNED", folder.file("tuned.json").c_str(), 1);
    for (const std::string& text : shapes_) {
      plan::Problem problem;
      problem.op = op;
      problem.nodes = flags_.options.spec.nodes;
      problem.locals = flags_.options.spec.local;
      MK_ASSIGN_OR_RETURN(problem.shape, parse_shape(text));
      MK_ASSIGN_OR_RETURN(const plan::TunedEntry entry,
                          tune(problem, machine, folder.file("tuned.json")));
      tuned.put(entry);
      // What has been found stays, whatever becomes of the rest.
      MK_RETURN_IF_ERROR(plan::save_tuned(tuned, path_));
    }
    return {};
  }

  Result<plan::TunedEntry> tune(const plan::Problem& problem, const plan::Machine& machine,
                                const std::string& file) {
    plan::TunedEntry entry;
    entry.op = problem.op;
    entry.machine = machine.name;
    entry.nodes = problem.nodes;
    entry.locals = problem.locals;
    entry.bucket = plan::bucket_of(problem.shape);
    entry.measured_us = 1;  // not known yet
    const auto candidates = candidates_to_try(problem, machine, 1 + within_);
    const auto begin = std::chrono::steady_clock::now();
    std::size_t tried = 0;
    const auto measure = [&](const plan::Candidate& candidate) -> Result<double> {
      plan::Tuned only;
      only.put(entry);
      only.entries[0].candidate = candidate;
      MK_RETURN_IF_ERROR(plan::save_tuned(only, file));
      show_progress(fmt::format("{} of {}: {}", ++tried, candidates.size(),
                                plan::describe(problem, candidate)));
      return measure_shape(problem.shape);
    };
    const auto goes_on = [&] {
      return std::chrono::steady_clock::now() - begin < std::chrono::duration<double>(seconds_);
    };
    MK_ASSIGN_OR_RETURN(const auto trials,
                        try_candidates(candidates, measure, goes_on, [](const std::string& reason) {
                          show_progress("");
                          print_out("left out: {}\n", reason);
                        }));
    show_progress("");
    print_out("{} {} x {} x {}: {:.1f} us, {}, the quickest of {} that ran ({} candidates)\n",
              operator_, problem.shape.m, problem.shape.n, problem.shape.k, trials[0].us,
              plan::describe(problem, trials[0].candidate), trials.size(), candidates.size());
    entry.candidate = trials[0].candidate;
    entry.measured_us = trials[0].us;
    return entry;
  }

  /// us, the slowest rank's, median.
  Result<double> measure_shape(const kernels::Shape& shape) {
    BenchOptions options = flags_.options;
    const auto operation = make_case(operator_);
    nlohmann::json of_case = operation->options();
    of_case["m"] = shape.m;
    of_case["n"] = shape.n;
    of_case["k"] = shape.k;
    options.spec.op = operator_;
    options.spec.operation = of_case;
    options.spec.modes = "fused";
    options.spec.verify = "first";
    MK_ASSIGN_OR_RETURN(const BenchResult result, run_bench(options, [](const std::string&) {}));
    if (!result.verification.passed())
      return fail(ErrorCode::kInternal, "{} elements are wrong, of {} launches checked",
                  result.verification.wrong, result.verification.launches_checked);
    return result.fused.total_ms.median * 1e3;
  }

  CLI::App& command_;
  RunFlags flags_;
  std::string operator_, path_;
  std::vector<std::string> shapes_;
  std::string machine_;
  double seconds_ = 120;
  double within_ = 0.15;
};

}  // namespace

std::unique_ptr<Command> make_tune_command(CLI::App& app) {
  return std::make_unique<TuneCommand>(app);
}

}  // namespace mk::bench
