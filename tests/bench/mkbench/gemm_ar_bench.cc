#include "tests/bench/mkbench/gemm_ar_bench.h"

#include <algorithm>
#include <chrono>
#include <fstream>
#include <optional>
#include <sstream>
#include <utility>

#include "client/tools/launch/daemons.h"
#include "client/tools/launch/process.h"
#include "client/tools/launch/ranks.h"

namespace mk::bench {
namespace {

using Clock = std::chrono::steady_clock;
using Progress = std::function<void(const std::string&)>;

/// Reports by launch and rank.
using Reports = std::vector<std::vector<LaunchReport>>;

struct Run {
  Reports reports;
  nlohmann::json links = nlohmann::json::array();
};

std::uint32_t launches_of(const GemmArSpec& spec) {
  return (spec.warmup + spec.iterations) * (spec.modes == "both" ? 2 : 1);
}

Result<tools::RankSet> start_ranks(const GemmArSpec& spec,
                                   const std::vector<std::string>& sockets) {
  const std::string job = tools::unique_job_name("mkbench");
  return tools::RankSet::start(spec.nodes * spec.local, [&](std::uint32_t rank) {
    return std::vector<std::string>{"rank",
                                    "--rank",
                                    std::to_string(rank),
                                    "--socket",
                                    sockets[rank / spec.local],
                                    "--job",
                                    job,
                                    "--spec",
                                    nlohmann::json(spec).dump()};
  });
}

Result<Reports> collect(const GemmArSpec& spec, tools::RankSet& ranks, const Progress& progress) {
  Reports reports(launches_of(spec));
  // A launch includes drawing inputs and checking; a rank's own deadlines end it much earlier when
  // something is wrong.
  const auto patience = std::chrono::milliseconds{spec.timeout_ms} * 4;
  for (std::size_t launch = 0; launch < reports.size(); ++launch) {
    const std::string what = fmt::format("launch {} of {}", launch + 1, reports.size());
    MK_ASSIGN_OR_RETURN(const auto lines, ranks.read_lines(patience, what));
    for (const std::string& line : lines) {
      const auto json = nlohmann::json::parse(line, nullptr, false);
      if (json.is_discarded())
        return fail(ErrorCode::kProtocol, "{}: a rank reported '{}'", what, line);
      reports[launch].push_back(json.get<LaunchReport>());
    }
    progress(what);
  }
  MK_RETURN_IF_ERROR(ranks.finish(patience));
  return reports;
}

Result<nlohmann::json> links_of(const std::string& admin_address, const std::string& folder) {
  MK_ASSIGN_OR_RETURN(const std::string mkctl,
                      tools::find_program("mkctl", {"../../../daemon/mkctl"}));
  tools::ProcessOptions process;
  process.name = "mkctl link list";
  process.output_path = folder + "/links.json";
  process.arguments = {mkctl, "--address", admin_address, "--json", "link", "list"};
  std::ofstream(process.output_path, std::ios::trunc).close();
  MK_ASSIGN_OR_RETURN(auto started, tools::Process::start(process));
  MK_RETURN_IF_ERROR(started.wait(Clock::now() + std::chrono::seconds{20}));
  std::ifstream file(process.output_path);
  auto parsed = nlohmann::json::parse(file, nullptr, false);
  if (parsed.is_discarded()) return fail(ErrorCode::kProtocol, "mkctl did not answer JSON");
  return parsed;
}

/// Daemons of our own, or the caller's, with the given pacing; all launches of `spec`; then the
/// links' counters.
Result<Run> run_world(const GemmArBenchOptions& options, const GemmArSpec& spec,
                      const std::string& bandwidth, const Progress& progress) {
  std::optional<tools::DaemonSet> daemons;
  std::vector<std::string> sockets = options.join_sockets;
  std::vector<std::string> admin = options.join_admin;
  if (sockets.empty()) {
    tools::DaemonSetOptions set;
    set.nodes = spec.nodes;
    set.rails = options.rails;
    set.fabric = options.fabric;
    set.link_bandwidth = bandwidth;
    set.link_latency = options.link_latency;
    MK_ASSIGN_OR_RETURN(auto started, tools::DaemonSet::start(set));
    daemons.emplace(std::move(started));
    for (std::uint32_t node = 0; node < spec.nodes; ++node) {
      sockets.push_back(daemons->client_socket(node));
      admin.push_back(daemons->admin_address(node));
    }
  }
  MK_ASSIGN_OR_RETURN(auto ranks, start_ranks(spec, sockets));
  Run run;
  auto reports = collect(spec, ranks, progress);
  if (!reports) {
    if (daemons) {
      if (const Status daemon = daemons->check(); !daemon) {
        return fail(reports.error().code, "{}\n{}", reports.error().message,
                    daemon.error().message);
      }
    }
    return propagate(reports);
  }
  run.reports = std::move(*reports);
  for (const std::string& address : admin) {
    MK_ASSIGN_OR_RETURN(auto links, links_of(address, ranks.folder()));
    run.links.push_back(std::move(links));
  }
  if (daemons) MK_RETURN_IF_ERROR(daemons->stop(std::chrono::seconds{20}));
  return run;
}

ModeFigures figures_of(const Reports& reports, bool fused) {
  ModeFigures figures;
  std::vector<double> compute;
  for (const auto& launch : reports) {
    if (launch.front().fused != fused || launch.front().warmup) continue;
    std::uint64_t total_ns = 0;
    std::uint64_t compute_ns = 0;
    for (const LaunchReport& rank : launch) {
      total_ns = std::max(total_ns, rank.total_ns);
      compute_ns = std::max(compute_ns, rank.compute_ns);
      figures.network_bytes_per_rank = std::max(figures.network_bytes_per_rank, rank.network_bytes);
      figures.commands_per_rank = std::max(figures.commands_per_rank, rank.network_commands);
    }
    figures.samples_ms.push_back(static_cast<double>(total_ns) * 1e-6);
    compute.push_back(static_cast<double>(compute_ns) * 1e-6);
  }
  figures.total_ms = summarise(figures.samples_ms);
  figures.compute_ms = summarise(compute);
  return figures;
}

Verification verification_of(const Reports& reports) {
  Verification verification;
  for (const auto& launch : reports) {
    ++verification.launches;
    bool same = true;
    bool checked = true;
    for (const LaunchReport& rank : launch) {
      same = same && rank.output_hash == launch.front().output_hash;
      checked = checked && rank.verified;
      verification.elements_compared += rank.compared;
      verification.wrong += rank.wrong;
      verification.worst_ratio = std::max(verification.worst_ratio, rank.worst_ratio);
      verification.max_error = std::max(verification.max_error, rank.max_error);
    }
    if (!same) ++verification.launches_with_differing_ranks;
    if (checked) ++verification.launches_checked;
  }
  return verification;
}

/// The bandwidth at which one link needs for a launch's bytes as long as the slowest rank needs for
/// its GEMM.
Result<std::string> balanced_bandwidth(const GemmArBenchOptions& options,
                                       const Progress& progress) {
  GemmArSpec spec = options.spec;
  spec.modes = "unfused";
  spec.verify = "none";
  spec.warmup = 1;
  spec.iterations = 5;
  progress("measuring the GEMM to balance the link");
  MK_ASSIGN_OR_RETURN(const Run run, run_world(options, spec, "", [](const std::string&) {}));
  const ModeFigures figures = figures_of(run.reports, false);
  // Local ranks that share a rail share its links; every launch sends the same bytes to each other
  // node.
  const std::uint32_t sharing = (spec.local + options.rails - 1) / options.rails;
  const double link_bytes =
      static_cast<double>(figures.network_bytes_per_rank) / std::max(1u, spec.nodes - 1) * sharing;
  const double bytes_per_second = link_bytes / (figures.compute_ms.median * 1e-3);
  if (!(bytes_per_second >= 1)) {
    return fail(ErrorCode::kInvalidArgument, "\"balanced\" needs a network: at least two nodes");
  }
  return fmt::format("{:.0f}MB/s", std::max(1.0, bytes_per_second * 1e-6));
}

}  // namespace

Result<GemmArBenchResult> run_gemm_ar_bench(const GemmArBenchOptions& options,
                                            const Progress& progress) {
  std::string bandwidth = options.link_bandwidth;
  if (bandwidth == "balanced") {
    MK_ASSIGN_OR_RETURN(bandwidth, balanced_bandwidth(options, progress));
    progress(fmt::format("link bandwidth: {}", bandwidth));
  }
  MK_ASSIGN_OR_RETURN(const Run run, run_world(options, options.spec, bandwidth, progress));
  GemmArBenchResult result;
  result.fabric = run.reports.front().front().fabric;
  result.link_bandwidth = bandwidth;
  result.fused = figures_of(run.reports, true);
  result.unfused = figures_of(run.reports, false);
  if (result.fused.total_ms.count > 0 && result.unfused.total_ms.count > 0) {
    result.speedup = result.unfused.total_ms.median / result.fused.total_ms.median;
  }
  result.verification = verification_of(run.reports);
  result.links = run.links;
  return result;
}

}  // namespace mk::bench
