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
#include "mkernel/mkernel.h"

namespace mk::tools {
namespace {

int report_error(const Error& error, int exit_code) {
  fmt::print(stderr, "mkrun: {}\n", error.message);
  return exit_code;
}

int gemm_ar_main(const GemmArJobOptions& options) {
  const auto job = plan_gemm_ar_job(options);
  if (!job) return report_error(job.error(), 2);
  fmt::print(
      "{}[{}, {}] = {}[{}, {}] x {}{} in {}, inner dimension split over {} nodes x {} ranks\n",
      job->out_name, job->m, job->n, job->a_name, job->m, job->k, job->b_name,
      job->b_transposed ? fmt::format("[{}, {}]^T", job->n, job->k)
                        : fmt::format("[{}, {}]", job->k, job->n),
      job->dtype, job->nodes, job->local);
  const bool terminal = ::isatty(STDERR_FILENO) == 1;
  const auto result = run_gemm_ar_job(options, *job, [&](std::uint64_t rows) {
    if (terminal)
      fmt::print(stderr, "\r\033[K{} of {} rows ({}%)", rows, job->m, rows * 100 / job->m);
  });
  if (terminal) fmt::print(stderr, "\r\033[K");
  if (!result) return report_error(result.error(), 1);
  fmt::print("{} launches, {:.2f} ms in all (slowest rank of each), {:.2f} MB over the network\n",
             result->launches, static_cast<double>(result->total_ns) * 1e-6,
             static_cast<double>(result->network_bytes) * 1e-6);
  if (options.check) {
    const std::string worst = result->worst_ratio < 1e29
                                  ? fmt::format("worst {:.2f} of it", result->worst_ratio)
                                  : "some are not finite";
    fmt::print("check: {} of {} elements outside their bound, {}\n", result->wrong,
               result->compared, worst);
  }
  if (result->wrong != 0) {
    return report_error({ErrorCode::kInternal, "the result is wrong; nothing was written"}, 1);
  }
  fmt::print("wrote {} ('{}')\n", job->out_file, job->out_name);
  return 0;
}

int rank_main(const std::vector<std::string>& words) {
  const auto arguments = parse_rank_arguments(words);
  if (!arguments) return report_error(arguments.error(), 2);
  const Status status = run_gemm_ar_job_rank(arguments->spec.get<GemmArJob>(), arguments->rank,
                                             arguments->socket, arguments->job, kReportFd);
  return status ? 0 : report_error(status.error(), 1);
}

int run(int argc, char** argv) {
  unwind_on_interrupt();
  if (argc > 1 && std::string_view(argv[1]) == kRankCommand)
    return rank_main({argv + 2, argv + argc});
  CLI::App app{"mkrun: mkernel's operators on the tensors of your own safetensors files"};
  app.require_subcommand(1);
  app.set_version_flag("--version", version());

  GemmArJobOptions options;
  CLI::App* gemm_ar =
      app.add_subcommand("gemm-ar", "C = A B, the inner dimension split over all ranks");
  gemm_ar->add_option("--a", options.a, "FILE.safetensors:TENSOR, [m, k]; BF16, F16 or F32")
      ->required();
  gemm_ar->add_option("--b", options.b, "FILE.safetensors:TENSOR, [k, n]; BF16, F16 or F32")
      ->required();
  gemm_ar->add_option("--out", options.out, "FILE.safetensors[:TENSOR], written when all is well")
      ->required();
  gemm_ar->add_flag("--b-transposed", options.b_transposed,
                    "B lies as [n, k], like a linear layer's weight");
  gemm_ar
      ->add_option("--dtype", options.dtype,
                   "compute and write in; default: f16 if both inputs are, else bf16")
      ->check(CLI::IsMember({"bf16", "f16"}));
  gemm_ar->add_flag("--check", options.check, "compare every element with float64");
  gemm_ar->add_option("--nodes", options.nodes)->check(CLI::Range(1, 16))->capture_default_str();
  gemm_ar->add_option("--local", options.local, "ranks per node")
      ->check(CLI::Range(1, 16))
      ->capture_default_str();
  gemm_ar->add_option("--rows", options.rows_per_launch, "rows of one launch")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  gemm_ar->add_option("--timeout-ms", options.timeout_ms, "of every wait")
      ->check(CLI::Range(100, 3600000))
      ->capture_default_str();
  gemm_ar->add_option("--fabric", options.fabric)
      ->check(CLI::IsMember({"loopback", "ofi", "verbs"}))
      ->capture_default_str();
  gemm_ar->add_option("--link-bandwidth", options.link_bandwidth,
                      "loopback: pace every link, e.g. 2GB/s");
  gemm_ar->add_option("--link-latency", options.link_latency, "loopback: e.g. 5us");
  gemm_ar
      ->add_option("--join", options.join_sockets,
                   "client sockets of running daemons, one per node")
      ->delimiter(',');
  try {
    app.parse(argc, argv);
    if (!options.join_sockets.empty() && options.join_sockets.size() != options.nodes) {
      throw CLI::ValidationError("--join", fmt::format("names {} sockets for {} nodes",
                                                       options.join_sockets.size(), options.nodes));
    }
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  return gemm_ar_main(options);
}

}  // namespace
}  // namespace mk::tools

int main(int argc, char** argv) {
  try {
    return mk::tools::run(argc, argv);
  } catch (const std::bad_alloc&) {
    fmt::print(stderr, "mkrun: out of memory\n");
    return 1;
  }
}
