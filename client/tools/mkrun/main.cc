/// \file
/// mkrun: an operator on tensors of your own files. Exit codes: 0 ok, 1 a failure or a wrong
/// result, 2 usage or bad input.

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "client/tools/launch/local_job.h"
#include "client/tools/launch/process.h"
#include "client/tools/mkrun/job.h"
#include "client/tools/mkrun/operators.h"
#include "client/tools/partition_choice.h"
#include "mkernel/mkernel.h"
#include "shm/files/standard_output.h"

namespace mk::tools {
namespace {

int report_error(const Error& error, int exit_code) {
  fmt::print(stderr, "mkrun: {}\n", error.message);
  return exit_code;
}

int operator_main(const JobOptions& options) {
  const auto job = plan_job(options);
  if (!job) return report_error(job.error(), 2);
  const bool terminal = ::isatty(STDERR_FILENO) == 1;
  auto writer = open_output(options, *job);
  if (!writer) {
    return report_error(writer.error(), writer.error().code == ErrorCode::kInvalidArgument ? 2 : 1);
  }
  print_out("{}: {}[{}] in {}, over {} nodes x {} ranks\n", job->op, job->out.name,
            fmt::join(job->out_shape, ", "), job->dtype, job->nodes, job->local);
  const auto result = run_job(options, *job, *writer, [&](std::uint64_t rows) {
    if (terminal)
      fmt::print(stderr, "\r\033[K{} of {} rows ({}%)", rows, job->rows, rows * 100 / job->rows);
  });
  if (terminal) fmt::print(stderr, "\r\033[K");
  if (!result) return report_error(result.error(), 1);
  print_out("{} launches, {:.2f} ms in all (slowest rank of each), {:.2f} MB over the network\n",
            result->launches, static_cast<double>(result->total_ns) * 1e-6,
            static_cast<double>(result->network_bytes) * 1e-6);
  if (result->nonfinite_partials != 0) {
    print_out("note: {} elements of partial sums were not finite in {}; {}\n",
              result->nonfinite_partials, job->dtype,
              job->dtype == "f16" ? "--dtype bf16 has a wider range"
                                  : "the inputs are not, or too large");
  }
  if (options.check) {
    const std::string worst =
        result->worst_ratio < 1e29
            ? fmt::format("largest error: {:.0f}% of the allowed rounding error",
                          100 * result->worst_ratio)
            : "some are not finite where they should be, or the reverse";
    print_out("check: {} of {} elements outside their bound; {}\n", result->wrong, result->compared,
              worst);
  }
  if (result->unlike != 0)
    print_out("check: the ranks' copies of the result differ after {} launches\n", result->unlike);
  if (!result->right()) {
    return report_error({ErrorCode::kInternal, "the result is wrong; nothing was written"}, 1);
  }
  print_out("wrote {} ('{}')\n", job->out.file, job->out.name);
  return 0;
}

int rank_main(const std::vector<std::string>& words) {
  const auto arguments = parse_rank_arguments(words);
  if (!arguments) return report_error(arguments.error(), 2);
  const Status status = run_job_rank(arguments->spec.get<Job>(), arguments->rank, arguments->socket,
                                     arguments->job, kReportFd);
  return status ? 0 : report_error(status.error(), 1);
}

/// Its options write to `options`.
void add_operator(CLI::App& app, const JobOperator& op, JobOptions& options) {
  CLI::App* command = app.add_subcommand(op.name(), op.help());
  command->callback([&options, &op] { options.op = op.name(); });
  command->footer("Exit status: 0 ok, 1 a failure or a wrong result, 2 usage or bad input.");
  for (const InputSpec& input : op.inputs()) {
    command
        ->add_option(std::string("--") + input.name, options.inputs[input.name],
                     fmt::format("FILE.safetensors:TENSOR, {}; {}", input.help,
                                 input.whole_numbers ? "I32 or I64" : "BF16, F16 or F32"))
        ->required(!input.optional);
  }
  command
      ->add_option("--out", options.out,
                   "FILE.safetensors[:TENSOR], written when all is well; a new file, or an earlier "
                   "output of mkrun")
      ->required();
  command->add_flag("--overwrite", options.overwrite,
                    "let --out replace any regular file that is no input");
  for (const FlagSpec& flag : op.flags())
    command->add_flag(std::string("--") + flag.name, options.*flag.value, flag.help);
  for (const NumbersSpec& numbers : op.numbers()) {
    command->add_option(std::string("--") + numbers.name, options.*numbers.value, numbers.help)
        ->delimiter(',');
  }
  for (const ChoiceSpec& choice : op.choices()) {
    command->add_option(std::string("--") + choice.name, options.*choice.value, choice.help)
        ->check(CLI::IsMember(choice.words))
        ->default_str(choice.words.front());
  }
  command
      ->add_option("--dtype", options.dtype,
                   "compute and write in; default: f16 if all inputs are, else bf16")
      ->check(CLI::IsMember({"bf16", "f16"}));
  command->add_option("--executor", options.executor, "cuda: on the GPUs of this machine")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  command->add_option("--partition", options.partition, kPartitionHelp)
      ->check(PartitionChoice::check, "CHOICE")
      ->capture_default_str();
  command->add_flag("--check", options.check, "compare every element with float64");
  command->add_option("--nodes", options.nodes)->check(CLI::Range(1, 16))->capture_default_str();
  command->add_option("--local", options.local, "ranks per node")
      ->check(CLI::Range(1, 16))
      ->capture_default_str();
  command->add_option("--rows", options.rows_per_launch, "rows of one launch, over all ranks")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command->add_option("--timeout-ms", options.timeout_ms, "of every wait")
      ->check(CLI::Range(100, 3600000))
      ->capture_default_str();
  command->add_option("--fabric", options.fabric)
      ->check(CLI::IsMember({"loopback", "ofi", "verbs"}))
      ->capture_default_str();
  command->add_option("--link-bandwidth", options.link_bandwidth,
                      "loopback: pace every link, e.g. 2GB/s");
  command->add_option("--link-latency", options.link_latency, "loopback: e.g. 5us");
  command
      ->add_option("--join", options.join_sockets,
                   "client sockets of running daemons, one per node")
      ->delimiter(',');
}

int run(int argc, char** argv) {
  unwind_on_interrupt();
  if (argc > 1 && std::string_view(argv[1]) == kRankCommand)
    return rank_main({argv + 2, argv + argc});
  CLI::App app{"mkrun: mkernel's operators on the tensors of your own safetensors files"};
  app.require_subcommand(1);
  app.footer(
      "Example:\n"
      "  mkrun gemm-ar --a acts.safetensors:x --b model.safetensors:layers.0.weight\n"
      "        --b-transposed --out y.safetensors --check\n\n"
      "`mkrun OPERATOR --help` lists an operator's options with their defaults.\n"
      "Exit status: 0 ok, 1 a failure or a wrong result, 2 usage or bad input. See mkrun(1).");
  app.set_version_flag("--version", version());

  JobOptions options;
  for (const JobOperator* op : job_operators()) add_operator(app, *op, options);
  try {
    app.parse(argc, argv);
    if (!options.join_sockets.empty() && options.join_sockets.size() != options.nodes) {
      throw CLI::ValidationError("--join", fmt::format("names {} sockets for {} nodes",
                                                       options.join_sockets.size(), options.nodes));
    }
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  return operator_main(options);
}

}  // namespace
}  // namespace mk::tools

int main(int argc, char** argv) {
  try {
    return mk::finish_output("mkrun", mk::tools::run(argc, argv));
  } catch (const std::bad_alloc&) {
    fmt::print(stderr, "mkrun: out of memory\n");
    return 1;
  }
}
