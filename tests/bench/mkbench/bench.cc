#include "tests/bench/mkbench/bench.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "client/tools/launch/local_job.h"
#include "daemon/config/units.h"
#include "tests/bench/mkbench/machine.h"
#include "tests/bench/mkbench/operator_case.h"

namespace mk::bench {
namespace {

using Clock = std::chrono::steady_clock;

struct Run {
  Reports reports;
  nlohmann::json links = nlohmann::json::array();
};

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

/// What joined daemons have counted before this run.
Result<std::vector<nlohmann::json>> links_before(const std::vector<std::string>& admin) {
  std::vector<nlohmann::json> all;
  if (admin.empty()) return all;
  std::string folder = "/tmp/mkbench-XXXXXX";
  if (::mkdtemp(folder.data()) == nullptr) return fail_errno(errno, "cannot make a folder in /tmp");
  Status status;
  for (const std::string& address : admin) {
    auto links = links_of(address, folder);
    if (links) {
      all.push_back(std::move(*links));
    } else if (status) {
      status = propagate(links);
    }
  }
  std::error_code left_behind;
  std::filesystem::remove_all(folder, left_behind);
  if (!status) return propagate(status);
  return all;
}

/// Daemons of our own, or the caller's, with the given pacing; all launches of `spec`; then the
/// links' counters.
Result<Run> run_world(const BenchOptions& options, const BenchSpec& spec,
                      const std::string& bandwidth, const Progress& progress) {
  tools::LocalJobOptions local;
  local.name = "mkbench";
  local.local = spec.local;
  local.daemons.nodes = spec.nodes;
  local.daemons.rails = options.rails;
  local.daemons.fabric = options.fabric;
  local.daemons.link_bandwidth = bandwidth;
  local.daemons.link_latency = options.link_latency;
  local.daemons.program = options.daemon_program;
  local.join_sockets = options.join_sockets;
  local.program = options.rank_program;
  MK_ASSIGN_OR_RETURN(const auto before, links_before(options.join_admin));
  MK_ASSIGN_OR_RETURN(auto job, tools::LocalJob::start(local, spec));
  Run run;
  // A launch includes drawing inputs and checking; a rank's own deadlines end it much earlier when
  // something is wrong.
  const auto patience = std::chrono::milliseconds{spec.timeout_ms} * 4;
  const std::uint32_t launches = spec.launches();
  for (std::uint32_t launch = 0; launch < launches; ++launch) {
    const std::string what = fmt::format("launch {} of {}", launch + 1, launches);
    MK_ASSIGN_OR_RETURN(const auto reports, job.read_reports(patience, what));
    auto& ranks = run.reports.emplace_back();
    for (const auto& report : reports) ranks.push_back(report.get<LaunchReport>());
    progress(what);
  }
  MK_RETURN_IF_ERROR(job.finish_ranks(patience));
  std::vector<std::string> admin = options.join_admin;
  if (job.daemons() != nullptr) {
    for (std::uint32_t node = 0; node < spec.nodes; ++node)
      admin.push_back(job.daemons()->admin_address(node));
  }
  for (const std::string& address : admin) {
    MK_ASSIGN_OR_RETURN(auto links, links_of(address, job.folder()));
    const std::size_t node = run.links.size();
    run.links.push_back(node < before.size() ? links_since(before[node], std::move(links))
                                             : std::move(links));
  }
  MK_RETURN_IF_ERROR(job.stop_daemons());
  return run;
}

/// The bandwidth at which the busiest link needs for a launch's bytes as long as the slowest rank
/// needs for its computation; of a collective, which computes nothing, none.
Result<std::string> balanced_bandwidth(const BenchOptions& options, const Progress& progress) {
  BenchSpec spec = options.spec;
  spec.modes = "unfused";
  spec.verify = "none";
  spec.warmup = 1;
  spec.iterations = 5;
  spec.trace = false;
  progress("measuring the computation to balance the link");
  MK_ASSIGN_OR_RETURN(const Run run, run_world(options, spec, "", [](const std::string&) {}));
  const ModeFigures figures = figures_of(run.reports, false);
  const double bytes = link_bytes(figures, work_of(run.reports), spec, options.rails);
  if (!(bytes >= 1)) {
    return fail(ErrorCode::kInvalidArgument, "\"{}\" needs a network: at least two nodes",
                kBalanced);
  }
  if (!(figures.compute_ms.median > 0)) return std::string();
  const double bytes_per_second = bytes / (figures.compute_ms.median * 1e-3);
  return fmt::format("{:.0f}MB/s", std::max(1.0, bytes_per_second * 1e-6));
}

/// Of each mode's traced launches the median one, by its slowest rank; all spans leave the reports.
std::vector<LaunchTrace> take_traces(const BenchSpec& spec, Reports& reports) {
  std::vector<LaunchTrace> traces;
  for (const bool fused : {true, false}) {
    std::vector<std::pair<std::uint64_t, LaunchTrace>> traced;
    for (auto& launch : reports) {
      if (launch.front().trace.is_null() || launch.front().fused != fused) continue;
      std::uint64_t total_ns = 0;
      LaunchTrace trace{fused ? "fused" : "unfused", spec.nodes, spec.local, {}};
      trace.about = {{"operator", spec.op},
                     {"shape", spec.operation},
                     {"launch", &launch - reports.data() + 1}};
      for (std::uint32_t rank = 0; rank < launch.size(); ++rank) {
        total_ns = std::max(total_ns, launch[rank].total_ns);
        add_spans(rank, launch[rank].trace, trace);
        launch[rank].trace = nullptr;
      }
      traced.emplace_back(total_ns, std::move(trace));
    }
    std::sort(traced.begin(), traced.end(),
              [](const auto& a, const auto& b) { return a.first < b.first; });
    if (!traced.empty()) traces.push_back(std::move(traced[traced.size() / 2].second));
  }
  return traces;
}

}  // namespace

Result<BenchResult> run_bench(const BenchOptions& options, const Progress& progress) {
  MK_ASSIGN_OR_RETURN(const auto operation, case_of(options.spec));
  std::string bandwidth = options.link_bandwidth;
  if (bandwidth == kBalanced) {
    MK_ASSIGN_OR_RETURN(bandwidth, balanced_bandwidth(options, progress));
    progress(fmt::format("link bandwidth: {}", bandwidth.empty() ? "not paced" : bandwidth));
  }
  double link_bytes_per_s = 0;
  if (!bandwidth.empty()) {
    MK_ASSIGN_OR_RETURN(link_bytes_per_s, daemon::parse_bandwidth(bandwidth));
  }
  MK_ASSIGN_OR_RETURN(Run run, run_world(options, options.spec, bandwidth, progress));
  BenchResult result;
  result.fabric = run.reports.front().front().fabric;
  result.link_bandwidth = bandwidth;
  result.fused = figures_of(run.reports, true);
  result.unfused = figures_of(run.reports, false);
  if (result.fused.total_ms.count > 0 && result.unfused.total_ms.count > 0) {
    result.speedup = result.unfused.total_ms.median / result.fused.total_ms.median;
  }
  result.work = work_of(run.reports);
  result.estimates = estimates_of(run.reports);
  RunRates rates{link_bytes_per_s, 0};
  // Read and written, by all ranks at once.
  if (options.spec.executor != "cuda")
    rates.local_bytes_per_s = 2 * copy_bytes_per_second() / options.spec.world();
  result.bound = bound_of(options.spec, options.rails, operation->problems(options.spec),
                          planned_machine(options.spec.executor), result.work, result.fused,
                          result.unfused, rates);
  result.verification =
      verification_of(run.reports, operation->outputs_are_equal(), options.spec.verify != "none");
  result.traces = take_traces(options.spec, run.reports);
  result.links = std::move(run.links);
  result.reports = std::move(run.reports);
  return result;
}

}  // namespace mk::bench
