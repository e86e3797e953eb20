/// \file
/// mkbench: the operators timed against their unfused forms, checked element by element. Exit
/// codes: 0 ok, 1 a wrong result or a failure, 2 usage.

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <new>
#include <string>

#include "client/tools/launch/process.h"
#include "client/tools/numeric/random_matrix.h"
#include "shm/host/segment.h"
#include "tests/bench/mkbench/gemm_ar_bench.h"
#include "tests/bench/mkbench/gemm_ar_rank.h"
#include "tests/bench/mkbench/machine.h"

namespace mk::bench {
namespace {

struct RankArguments {
  std::uint32_t rank = 0;
  std::string socket, job, spec;
};

int rank_main(const RankArguments& arguments) {
  const auto json = nlohmann::json::parse(arguments.spec, nullptr, false);
  if (json.is_discarded()) {
    fmt::print(stderr, "mkbench rank: --spec is not JSON\n");
    return 2;
  }
  const Status status = run_gemm_ar_rank(json.get<GemmArSpec>(), arguments.rank, arguments.socket,
                                         arguments.job, tools::kReportFd);
  if (status) return 0;
  fmt::print(stderr, "rank {}: {}: {}\n", arguments.rank, error_code_name(status.error().code),
             status.error().message);
  return 1;
}

/// On a terminal one line that changes; elsewhere nothing, so that logs stay short.
void show_progress(const std::string& text) {
  if (::isatty(STDERR_FILENO) == 1) fmt::print(stderr, "\r\033[K{}", text);
}

std::string megabytes(double bytes) { return fmt::format("{:.2f} MB", bytes * 1e-6); }

void print_mode(const char* name, const ModeFigures& figures) {
  if (figures.total_ms.count == 0) return;
  fmt::print("  {:<8} {:9.2f} ms median   ({:.2f} .. {:.2f}, {} launches; GEMM part {:.2f} ms)\n",
             name, figures.total_ms.median, figures.total_ms.min, figures.total_ms.max,
             figures.total_ms.count, figures.compute_ms.median);
}

void print_links(const nlohmann::json& by_node) {
  for (std::size_t node = 0; node < by_node.size(); ++node) {
    const auto& links = by_node[node].is_object()
                            ? by_node[node].value("links", nlohmann::json::array())
                            : by_node[node];
    for (const auto& link : links) {
      const auto number = [&](const char* key) {
        const auto found = link.find(key);
        if (found == link.end()) return 0.0;
        return found->is_string() ? std::stod(found->get<std::string>()) : found->get<double>();
      };
      fmt::print("  node {} -> node {:.0f}, rail {:.0f}: {} in {:.0f} messages, {:.0f} errors\n",
                 node, number("peer"), number("rail"), megabytes(number("bytes")),
                 number("messages"), number("errors"));
    }
  }
}

void print_report(const GemmArBenchOptions& options, const GemmArBenchResult& result) {
  const GemmArSpec& spec = options.spec;
  fmt::print("GEMM+AllReduce  {} node{} x {} rank{}, C[{}, {}] = sum of A[{}, {}] B[{}, {}], {}\n",
             spec.nodes, spec.nodes == 1 ? "" : "s", spec.local, spec.local == 1 ? "" : "s", spec.m,
             spec.n, spec.m, spec.k, spec.k, spec.n, spec.dtype);
  fmt::print("network         {}{}{}\n", result.fabric,
             result.link_bandwidth.empty()
                 ? ""
                 : fmt::format(", each link paced to {}", result.link_bandwidth),
             options.link_latency.empty() ? "" : fmt::format(", latency {}", options.link_latency));
  const Verification& v = result.verification;
  if (v.launches_checked == 0) {
    fmt::print("result          NOT CHECKED (--verify none)\n");
  } else if (v.passed()) {
    fmt::print(
        "result          correct: {} of {} launches checked, {} elements against float64, worst "
        "error {:.2f} of its "
        "bound; all ranks bitwise equal\n",
        v.launches_checked, v.launches, v.elements_compared, v.worst_ratio);
  } else {
    fmt::print(
        "result          WRONG: {} of {} elements outside their bound (worst {:.2f} of it), {} "
        "launches in which "
        "ranks differ\n",
        v.wrong, v.elements_compared, v.worst_ratio, v.launches_with_differing_ranks);
  }
  fmt::print("time            slowest rank of each launch\n");
  print_mode("fused", result.fused);
  print_mode("unfused", result.unfused);
  if (result.speedup > 0) fmt::print("  fused is {:.2f}x as fast as unfused\n", result.speedup);
  const ModeFigures& mode = result.fused.total_ms.count > 0 ? result.fused : result.unfused;
  fmt::print("network         {} in {} commands per rank and launch{}\n",
             megabytes(static_cast<double>(mode.network_bytes_per_rank)), mode.commands_per_rank,
             result.links.empty() ? "" : "; over all launches:");
  print_links(result.links);
}

nlohmann::json json_report(const GemmArBenchOptions& options, const GemmArBenchResult& result,
                           const std::string& command) {
  return {{"tool", "mkbench gemm-ar"},
          {"version", version()},
          {"date", utc_now()},
          {"command", command},
          {"machine", describe_machine()},
          {"spec", options.spec},
          {"fabric", result.fabric},
          {"rails", options.rails},
          {"link_bandwidth", result.link_bandwidth},
          {"link_latency", options.link_latency},
          {"baseline",
           "unfused: the same executor and data path, whole GEMM first, then the collective"},
          {"fused", result.fused},
          {"unfused", result.unfused},
          {"speedup_median", result.speedup},
          {"verification", result.verification},
          {"correct", result.verification.passed()},
          {"links", result.links}};
}

int gemm_ar_main(const GemmArBenchOptions& options, const std::string& json_path,
                 const std::string& command) {
  const auto result = run_gemm_ar_bench(options, show_progress);
  show_progress("");
  if (!result) {
    fmt::print(stderr, "mkbench: {}\n", result.error().message);
    return 1;
  }
  print_report(options, *result);
  if (!json_path.empty()) {
    std::ofstream file(json_path);
    file << json_report(options, *result, command).dump(1) << "\n";
    if (!file.flush()) {
      fmt::print(stderr, "mkbench: cannot write {}\n", json_path);
      return 1;
    }
  }
  return result->verification.passed() ? 0 : 1;
}

int run(int argc, char** argv) {
  tools::unwind_on_interrupt();
  CLI::App app{
      "mkbench: mkernel's operators, timed against their unfused forms and checked element by "
      "element"};
  app.require_subcommand(1);
  app.set_version_flag("--version", version());

  GemmArBenchOptions options;
  GemmArSpec& spec = options.spec;
  spec.seed = tools::mix64(shm::monotonic_ns() ^ static_cast<std::uint64_t>(::getpid()) << 32);
  std::string json_path;
  CLI::App* gemm_ar =
      app.add_subcommand("gemm-ar", "GEMM+AllReduce: C = sum over ranks of A B, on every rank");
  gemm_ar->add_option("--nodes", spec.nodes, "nodes, each with a daemon of its own")
      ->check(CLI::Range(1, 16))
      ->capture_default_str();
  gemm_ar->add_option("--local", spec.local, "ranks per node")
      ->check(CLI::Range(1, 16))
      ->capture_default_str();
  gemm_ar->add_option("--m", spec.m, "rows of A and C")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  gemm_ar->add_option("--n", spec.n, "columns of B and C")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  gemm_ar->add_option("--k", spec.k, "inner dimension of each rank")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  gemm_ar->add_option("--dtype", spec.dtype)
      ->check(CLI::IsMember({"bf16", "f16"}))
      ->capture_default_str();
  gemm_ar->add_option("--fabric", options.fabric)
      ->check(CLI::IsMember({"loopback", "ofi"}))
      ->capture_default_str();
  gemm_ar->add_option("--rails", options.rails, "NICs per node")
      ->check(CLI::Range(1, 16))
      ->capture_default_str();
  gemm_ar->add_option("--link-bandwidth", options.link_bandwidth,
                      "loopback: pace every link, e.g. 2GB/s; \"balanced\": as long for a launch's "
                      "bytes as for the GEMM");
  gemm_ar->add_option("--link-latency", options.link_latency, "loopback: e.g. 5us");
  gemm_ar->add_option("--iters", spec.iterations, "timed launches of each mode")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  gemm_ar->add_option("--warmup", spec.warmup, "untimed launches of each mode first")
      ->check(CLI::Range(0, 1000))
      ->capture_default_str();
  gemm_ar->add_option("--modes", spec.modes)
      ->check(CLI::IsMember({"both", "fused", "unfused"}))
      ->capture_default_str();
  gemm_ar->add_option("--verify", spec.verify, "which launches to check")
      ->check(CLI::IsMember({"all", "first", "none"}))
      ->capture_default_str();
  gemm_ar->add_option("--seed", spec.seed, "of the inputs; default: fresh");
  gemm_ar->add_option("--tile-m", spec.tile_m);
  gemm_ar->add_option("--tile-n", spec.tile_n);
  gemm_ar->add_option("--chunk-bytes", spec.chunk_bytes, "payload of a network command");
  gemm_ar->add_option("--compute-blocks", spec.compute_blocks, "compute threads of a rank");
  gemm_ar->add_option("--timeout-ms", spec.timeout_ms, "of every wait")
      ->check(CLI::Range(100, 3600000))
      ->capture_default_str();
  gemm_ar
      ->add_option("--join", options.join_sockets,
                   "client sockets of running daemons, one per node")
      ->delimiter(',');
  gemm_ar->add_option("--admin", options.join_admin, "their Admin addresses, for link figures")
      ->delimiter(',');
  gemm_ar->add_option("--json", json_path, "write the whole report here");

  RankArguments rank;
  CLI::App* rank_command =
      app.add_subcommand("rank", "")->group("");  // what mkbench starts itself with
  rank_command->add_option("--rank", rank.rank)->required();
  rank_command->add_option("--socket", rank.socket)->required();
  rank_command->add_option("--job", rank.job)->required();
  rank_command->add_option("--spec", rank.spec)->required();

  try {
    app.parse(argc, argv);
    if (*gemm_ar && !options.join_sockets.empty() && options.join_sockets.size() != spec.nodes) {
      throw CLI::ValidationError("--join", fmt::format("names {} sockets for {} nodes",
                                                       options.join_sockets.size(), spec.nodes));
    }
    if (*gemm_ar && !options.join_sockets.empty() &&
        gemm_ar->count("--fabric") + gemm_ar->count("--rails") +
                gemm_ar->count("--link-bandwidth") + gemm_ar->count("--link-latency") >
            0) {
      throw CLI::ValidationError(
          "--join",
          "running daemons have their own fabric, rails and links: leave those flags out");
    }
    if (*gemm_ar && options.fabric != "loopback" &&
        !(options.link_bandwidth + options.link_latency).empty()) {
      throw CLI::ValidationError("--link-bandwidth", "only the loopback fabric has a link model");
    }
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  if (*rank_command) return rank_main(rank);
  std::string command;
  for (int i = 0; i < argc; ++i)
    command += fmt::format("{}{}", i == 0 ? "" : " ", i == 0 ? "mkbench" : argv[i]);
  return gemm_ar_main(options, json_path, command);
}

}  // namespace
}  // namespace mk::bench

int main(int argc, char** argv) {
  try {
    return mk::bench::run(argc, argv);
  } catch (const std::bad_alloc&) {
    fmt::print(stderr,
               "mkbench: out of memory: the matrices and their float64 reference must fit\n");
    return 1;
  }
}
