#include <fstream>
#include <string>

#include "shm/files/standard_output.h"
#include "tests/bench/mkbench/at_least_one.h"
#include "tests/bench/mkbench/calibrate.h"
#include "tests/bench/mkbench/command.h"
#include "tests/bench/mkbench/report_files.h"

namespace mk::bench {
namespace {

namespace plan = kernels::plan;

/// `mkbench calibrate`: the machine file of this CPU or GPU.
class CalibrateCommand : public Command {
 public:
  explicit CalibrateCommand(CLI::App& app)
      : command_(*app.add_subcommand(
            "calibrate", "measure this machine, and write a machine file for the planner")) {
    command_.add_option("--executor", executor_, "cpu, or cuda: the current GPU")
        ->check(CLI::IsMember({"cpu", "cuda"}))
        ->capture_default_str();
    command_.add_option("--out", out_, "the file; without, it is printed");
    command_.add_flag("--daemons", daemons_,
                      "cpu: measure commands, steps and links, too, through daemons started here");
    command_
        .add_option("--network-gb-s", network_gb_s_,
                    "a rail's rate, until the daemon has measured it (1 GB/s: 8 Gb/s)")
        ->check(more_than_0());
  }

  bool chosen() const override { return command_.parsed(); }
  void check() const override {
    if (daemons_ && executor_ != "cpu")
      throw CLI::ValidationError("--daemons",
                                 "they measure what CPUs see of commands; leave it out with a GPU");
  }

  int run() override {
    auto machine = measured();
    if (!machine) return report_error(machine.error());
    if (network_gb_s_ > 0) machine->network_gb_s = network_gb_s_;
    const std::string text = plan::machine_text(*machine);
    // What it has written, it reads: numbers that make no sense are not left to the next launch.
    if (const auto read = plan::parse_machine(text, "what was measured"); !read)
      return report_error(read.error());
    if (out_.empty()) {
      print_out("{}", text);
      return 0;
    }
    std::ofstream file(out_);
    if (!(file << text).flush())
      return report_error({ErrorCode::kSystem, fmt::format("cannot write {}", out_)});
    print_out("{} is written; Tuning::machine_file or MKERNEL_MACHINE={} plans by it\n", out_,
              out_);
    return 0;
  }

 private:
  Result<plan::Machine> measured() const {
    if (executor_ == "cuda") {
      MK_ASSIGN_OR_RETURN(const GpuMeasured gpu, measure_gpu());
      return calibrated(plan::machine_for_gpu(gpu.name, gpu.sms).machine, gpu);
    }
    MK_ASSIGN_OR_RETURN(const CpuMeasured cpu, measure_cpu());
    MK_ASSIGN_OR_RETURN(const plan::Machine like, plan::shipped_machine("CPU"));
    if (!daemons_) return calibrated(like, cpu);
    const auto commands = measure_commands(show_progress);
    show_progress("");
    if (!commands) return propagate(commands);
    return calibrated(calibrated(like, cpu), *commands);
  }

  CLI::App& command_;
  std::string executor_ = "cpu";
  std::string out_;
  double network_gb_s_ = 0;
  bool daemons_ = false;
};

}  // namespace

std::unique_ptr<Command> make_calibrate_command(CLI::App& app) {
  return std::make_unique<CalibrateCommand>(app);
}

}  // namespace mk::bench
