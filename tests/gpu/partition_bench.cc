/// \file
/// partition_bench: an adaptive partition (CudaOptions::adaptive) beside static ones.
///
///     partition_bench [--devices D] [--lead L] [as operators_bench: --op --ranks --nodes
///                     --mkerneld --link-bandwidth --shape --launches --check-up-to --json]
///
/// It times the planned partition, and static ones with a quarter to four times as many groups that
/// communicate. Adaptive ones begin with the planned one, with a quarter and with four times as
/// many. Each adaptive one has L launches (64) to adapt. Then all are timed,
/// interleaved in random order, begun together; a launch's time is its slowest rank's. `ratio`:
/// over the best of the planned and the static ones. Results of adaptive ones are checked, every
/// element, up to M rows (8192).
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "tests/gpu/bench_options.h"
#include "tests/gpu/daemon_nodes.h"
#include "tests/gpu/devices.h"
#include "tests/gpu/operator_ranks.h"
#include "tests/gpu/stopwatch.h"

namespace {

using mk::test::BenchRun;
using mk::test::DaemonNodes;
using mk::test::Job;
using mk::test::JobSetup;
using mk::test::require;
using mk::test::Stopwatch;
using mk::test::Timing;
using Json = nlohmann::ordered_json;

struct Options : mk::test::BenchOptions {
  int devices = 1;
  int lead = 64;
};

/// One partition, on ranks of its own.
struct Contender {
  std::string name;
  bool adaptive = false;
  std::unique_ptr<Job> job;
  std::unique_ptr<Stopwatch> stopwatch;
  Timing timing;

  void run(Timing& into) {
    const auto launch = [this] {
      for (std::uint32_t r = 0; r < job->world(); ++r) {
        job->make_current(r);
        if (auto launched = job->launch(r, job->setup().m); !launched) {
          fmt::print(stderr, "{}: {}\n", name, launched.error().message);
          std::exit(1);
        }
      }
    };
    stopwatch->run(launch, into);
  }
  /// Rank 0's blocks that communicate: first (adaptive only) and last.
  mk::kernels::PartitionStats partition() {
    auto stats = job->op(0).finish(job->stream(0));
    if (!stats) {
      fmt::print(stderr, "{}: {}\n", name, stats.error().message);
      std::exit(1);
    }
    return stats->partition;
  }
};

Contender contend(const JobSetup& setup, std::string name) {
  Contender made;
  made.name = std::move(name);
  made.adaptive = setup.options.adaptive;
  made.job = std::make_unique<Job>(setup);
  for (std::uint32_t r = 0; r < made.job->world(); ++r) {
    made.job->fill(r, mk::test::fresh_seed() >> 16);
    made.job->poison(r);
    require(cudaStreamSynchronize(made.job->stream(r)), "inputs");
  }
  made.stopwatch = std::make_unique<Stopwatch>(*made.job);
  return made;
}

/// Groups, `factor` times what is planned; false: too many for a GPU.
bool scale(JobSetup& setup, mk::test::RankOperator& planned, double factor) {
  constexpr double kMost = 3 * 96;
  const auto scaled = [factor](double count) { return std::max(1.0, std::round(count * factor)); };
  const double streams = planned.stream_groups();
  const double receives = planned.blocks().receive.count();
  const double all = (streams > 0 ? scaled(streams) : 0) + (receives > 0 ? scaled(receives) : 0);
  if (all > kMost || (receives > 0 && scaled(receives) > mk::kernels::kBlocksMax)) return false;
  if (streams > 0) setup.options.stream_groups = static_cast<std::uint32_t>(scaled(streams));
  if (receives > 0) setup.options.receive_groups = static_cast<std::uint32_t>(scaled(receives));
  return true;
}

bool measure(const Options& options, const BenchRun& run, DaemonNodes* daemons, Json& rows) {
  JobSetup setup = mk::test::setup_of(options, run);
  setup.devices = options.devices;
  setup.in_workspace = run.op == mk::test::Op::kGemmAr;
  if (daemons != nullptr) {
    daemons->attach();
    setup.join = [&](std::uint64_t bytes, std::uint32_t flags) {
      return daemons->memory(bytes, flags);
    };
  }
  std::vector<Contender> all;
  all.push_back(contend(setup, "planned"));
  mk::test::RankOperator& planned = all[0].job->op(0);
  const std::uint32_t streams = planned.stream_groups();
  for (const double factor : {0.25, 0.5, 0.7, 1.4, 2.0, 4.0}) {
    JobSetup with = setup;
    if (scale(with, planned, factor)) all.push_back(contend(with, fmt::format("x{}", factor)));
  }
  for (const double factor : {1.0, 0.25, 4.0}) {
    JobSetup with = setup;
    with.options.adaptive = true;
    if (factor == 1 || scale(with, planned, factor))
      all.push_back(contend(with, fmt::format("adaptive x{}", factor)));
  }
  std::map<std::string, double> lead_us;
  for (Contender& one : all) {
    Timing lead;
    const int launches = one.adaptive ? options.lead : 3;
    for (int i = 0; i < launches; ++i) one.run(lead);
    for (const double us : lead.slowest) lead_us[one.name] += us / launches;
  }
  std::vector<Contender*> order;
  for (Contender& one : all) order.push_back(&one);
  std::minstd_rand random;
  for (int round = 0; round < options.launches; ++round) {
    std::shuffle(order.begin(), order.end(), random);
    for (Contender* one : order) one->run(one->timing);
  }
  const Contender* best = nullptr;
  for (const Contender& one : all) {
    if (!one.adaptive && (best == nullptr || one.timing.us() < best->timing.us())) best = &one;
  }
  Json row = mk::test::row_of(options, run, planned);
  row["best_static"] = best->name;
  fmt::print("{} {}x{} {} {} {} s{}: best {} {:.1f}", name(run.op), options.nodes, setup.locals,
             run.shape.m, run.shape.n, run.shape.k, streams, best->name, best->timing.us());
  bool right = true;
  for (Contender& one : all) {
    const double ratio = one.timing.us() / best->timing.us();
    Json& side = row["partitions"][one.name];
    side["us"] = mk::test::summary_of(one.timing.slowest);
    side["stream_groups"] = one.job->op(0).stream_groups();
    side["ratio"] = ratio;
    fmt::print(" | {} {:.1f} {:.3f}", one.name, one.timing.us(), ratio);
    if (!one.adaptive) continue;
    const mk::kernels::PartitionStats partition = one.partition();
    side["moves"] = partition.moves;
    side["sms_that_communicate"] = partition.last;
    side["mean_us_while_adapting"] = lead_us[one.name];
    fmt::print(" ({} SMs, {} moves)", partition.last, partition.moves);
    if (run.shape.m > options.check_up_to) continue;
    for (std::uint32_t r = 0; r < one.job->world(); ++r) one.job->poison(r);
    for (std::uint32_t r = 0; r < one.job->world(); ++r)
      require(cudaStreamSynchronize(one.job->stream(r)), "poison");
    Timing once;
    one.run(once);
    const mk::test::Verdict verdict = one.job->judge_all(setup.m);
    side["wrong_elements"] = verdict.bad;
    right = right && verdict.right();
    fmt::print(" {} wrong", verdict.bad);
  }
  fmt::print("\n");
  std::fflush(stdout);
  rows.push_back(row);
  return right;
}

int usage() {
  fmt::print(stderr, "partition_bench [--devices D] [--lead L] {}\n", Options::kUsage);
  return 2;
}

int run(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (i + 1 == argc) return usage();
    const std::string value = argv[++i];
    const auto taken = options.take(argument, value);
    if (taken == Options::Taken::kYes) continue;
    if (taken == Options::Taken::kWrong) return usage();
    if (argument == "--devices") {
      options.devices = std::atoi(value.c_str());
    } else if (argument == "--lead") {
      options.lead = std::atoi(value.c_str());
    } else {
      return usage();
    }
  }
  if (options.devices < 1 || options.nodes < 1 || options.lead < 1) return usage();
  if (!options.settle()) return 2;
  if (options.ranks == 0) options.ranks = static_cast<std::uint32_t>(options.devices);
  options.devices = std::min(options.devices, static_cast<int>(options.ranks));
  if (options.ranks % options.nodes != 0) return usage();
  std::unique_ptr<DaemonNodes> daemons;
  if (options.nodes > 1) {
    // Before this process asks CUDA anything: see operators_bench.
    daemons = std::make_unique<DaemonNodes>(
        options.nodes, options.locals(),
        mk::test::dealt_out(options.ranks, static_cast<std::uint32_t>(options.devices)),
        options.mkerneld, options.link_bandwidth);
  }
  if (options.devices > mk::test::device_count()) {
    fmt::print(stderr, "{} devices are asked for, and {} are there\n", options.devices,
               mk::test::device_count());
    return 1;
  }
  Json rows = Json::array();
  const bool right = mk::test::run_all(
      options, [&](const BenchRun& one) { return measure(options, one, daemons.get(), rows); });
  if (!options.json.empty()) {
    Json document = mk::test::document_of(options, "partition_bench", argc, argv, options.devices);
    document["times"] = fmt::format(
        "us; slowest rank of a launch, begun together; interleaved in random order, adaptive ones "
        "after {} launches",
        options.lead);
    document["network"] =
        network_of(options, options.mkerneld.empty() ? "in this process" : "beside it");
    document["rows"] = rows;
    if (!mk::test::write(options, document)) return 1;
  }
  return right ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) { return run(argc, argv); }
