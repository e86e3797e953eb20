/// \file
/// partition_bench: an adaptive partition (CudaOptions::adaptive) beside static ones.
///
///     partition_bench [--devices D] [--lead L] [--experts E] [--top-k K] [--hot SHARE]
///                     [--planned-for BYTES/s]
///                     [as operators_bench: --op (and ring, moe, combine) --ranks --nodes
///                     --mkerneld --link-bandwidth --shape --launches --check-up-to --json]
///
/// It times the planned partition, and static ones with a quarter to four times as many groups that
/// communicate. Adaptive ones begin with the planned one, with a quarter and with four times as
/// many. Each adaptive one has L launches (96) to adapt. Then all are timed,
/// interleaved in random order, begun together; a launch's time is its slowest rank's. `ratio`:
/// over the best of the planned and the static ones. Results of adaptive ones are checked, every
/// element, up to M rows (8192).
/// No plan knows of --hot, by which so much of the tokens' choices goes to rank 0's experts. With
/// --planned-for operators are planned for rails of another rate than --link-bandwidth.
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "kernels/plan/legal.h"
#include "tests/gpu/bench_devices.h"
#include "tests/gpu/bench_shapes.h"
#include "tests/gpu/partition_ranks.h"
#include "tests/gpu/stopwatch.h"

namespace {

using mk::test::CommGroups;
using mk::test::DaemonNodes;
using mk::test::PartitionCase;
using mk::test::PartitionRanks;
using mk::test::PlacedSetup;
using mk::test::Stopwatch;
using mk::test::TimedStream;
using mk::test::Timing;
using Json = nlohmann::ordered_json;

struct Options : mk::test::DeviceOptions {
  int lead = 96;
  PartitionCase what;
  double planned_for = 0;           ///< bytes/s; 0: the rails' own
  std::vector<std::string> others;  ///< operators that are no products
};

/// Ends the process, having said why.
[[noreturn]] void refuse(const std::string& name, const mk::Error& error) {
  fmt::print(stderr, "{}: {}\n", name, error.message);
  std::exit(1);
}

/// One partition, on ranks of its own.
struct Contender {
  std::string name;
  bool adaptive = false;
  std::unique_ptr<PartitionRanks> ranks;
  std::unique_ptr<Stopwatch> stopwatch;
  Timing timing;

  void run(Timing& into) {
    const auto launch = [this] {
      for (std::uint32_t r = 0; r < ranks->world(); ++r) {
        if (auto launched = ranks->launch(r); !launched) refuse(name, launched.error());
      }
    };
    stopwatch->run(launch, into);
  }
  /// Rank 0's, in the last launch.
  mk::kernels::PartitionStats partition() const {
    auto stats = ranks->finish(0);
    if (!stats) refuse(name, stats.error());
    return stats->partition;
  }
};

Contender contend(const PartitionCase& what, const PlacedSetup& job, std::string name) {
  Contender made;
  made.name = std::move(name);
  made.adaptive = job.options.adaptive;
  made.ranks = mk::test::make_partition_ranks(what, job);
  PartitionRanks* const ranks = made.ranks.get();
  std::vector<TimedStream> streams;
  for (std::uint32_t r = 0; r < ranks->world(); ++r)
    streams.push_back({ranks->device(r), ranks->stream(r)});
  made.stopwatch = std::make_unique<Stopwatch>(std::move(streams), [ranks] {
    for (std::uint32_t r = 0; r < ranks->world(); ++r)
      fmt::print(stderr, "{}\n", ranks->progress(r));
  });
  return made;
}

/// Groups, `factor` times what is planned. False: they leave the product less than an eighth of a
/// rank's share, or are too many for a role.
bool scale(PlacedSetup& job, const CommGroups& planned, double factor, std::uint32_t blocks) {
  const auto scaled = [factor](double count) { return std::max(1.0, std::round(count * factor)); };
  const double streams = planned.streams > 0 ? scaled(planned.streams) : 0;
  const double receives = planned.receives > 0 ? scaled(planned.receives) : 0;
  const double most = 3 * (blocks - std::max(1u, blocks / 8)) - 3;
  if (streams + receives + planned.watchers > most || receives > mk::kernels::kBlocksMax)
    return false;
  if (streams > 0)
    job.options.stream_groups = planned.watchers + static_cast<std::uint32_t>(streams);
  if (receives > 0) job.options.receive_groups = static_cast<std::uint32_t>(receives);
  return true;
}

/// Rank 0's partition, launch after launch, and how long they took.
Json adapt(Contender& one, int launches) {
  Json path = Json::array();
  for (int i = 0; i < launches; ++i) {
    Timing timing;
    one.run(timing);
    path.push_back({one.partition().last, std::round(timing.us() * 10) / 10});
  }
  return path;
}

bool measure(const Options& options, const PartitionCase& what, DaemonNodes* daemons, Json& rows) {
  PlacedSetup job;
  job.nodes = options.nodes;
  job.locals = options.locals();
  job.devices = options.devices;
  job.options = options.cuda;
  job.options.wait_timeout = std::chrono::seconds(5);
  job.options.rates.network_bytes_per_s = options.planned_for;
  job.join = mk::test::join_of(daemons);
  std::vector<Contender> all;
  all.push_back(contend(what, job, "planned"));
  const CommGroups planned = all[0].ranks->groups(0);
  // Others scale with what the planner's first launch has; a rank's share of its GPU:
  const auto per_device = (options.ranks + static_cast<std::uint32_t>(options.devices) - 1) /
                          static_cast<std::uint32_t>(options.devices);
  const std::uint32_t shares = per_device > 1 && options.nodes > 1 ? per_device + 1 : per_device;
  const std::uint32_t blocks =
      mk::kernels::plan::blocks_of_share(mk::test::kMultiprocessors, shares);
  for (const double factor : {0.25, 0.5, 0.7, 1.4, 2.0, 4.0}) {
    PlacedSetup with = job;
    if (scale(with, planned, factor, blocks))
      all.push_back(contend(what, with, fmt::format("x{}", factor)));
  }
  for (const double factor : {1.0, 0.25, 4.0}) {
    PlacedSetup with = job;
    with.options.adaptive = true;
    if (factor == 1 || scale(with, planned, factor, 2 * blocks))
      all.push_back(contend(what, with, fmt::format("adaptive x{}", factor)));
  }
  std::vector<Json> paths;
  for (Contender& one : all) paths.push_back(adapt(one, one.adaptive ? options.lead : 3));
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
  Json row = {{"op", what.op},
              {"nodes", options.nodes},
              {"ranks", options.ranks},
              {"shape", {what.shape.m, what.shape.n, what.shape.k}},
              {"compute_blocks", planned.compute_blocks},
              {"stream_groups", planned.streams + planned.watchers},
              {"receive_groups", planned.receives}};
  if (what.op == "moe" || what.op == "combine") {
    row["experts"] = what.experts;
    row["top_k"] = what.top_k;
    row["hot"] = what.hot;
  }
  if (options.planned_for > 0) row["planned_for_bytes_per_s"] = options.planned_for;
  row["best_static"] = best->name;
  fmt::print("{} {}x{} {} {} {} s{}: best {} {:.1f}", what.op, options.nodes, job.locals,
             what.shape.m, what.shape.n, what.shape.k, planned.streams, best->name,
             best->timing.us());
  bool right = true;
  for (std::size_t i = 0; i < all.size(); ++i) {
    Contender& one = all[i];
    const double ratio = one.timing.us() / best->timing.us();
    Json& side = row["partitions"][one.name];
    side["us"] = mk::test::summary_of(one.timing.slowest);
    side["stream_groups"] = one.ranks->groups(0).streams;
    side["ratio"] = ratio;
    fmt::print(" | {} {:.1f} {:.3f}", one.name, one.timing.us(), ratio);
    side["sms_that_communicate"] = blocks - one.ranks->groups(0).compute_blocks;
    if (!one.adaptive) continue;
    const mk::kernels::PartitionStats partition = one.partition();
    side["moves"] = partition.moves;
    side["sms_that_communicate"] = partition.last;
    double sum_us = 0;
    for (const Json& launch : paths[i]) sum_us += launch[1].get<double>();
    side["mean_us_while_adapting"] = sum_us / options.lead;
    side["sms_and_us_by_launch"] = paths[i];
    fmt::print(" ({} SMs, {} moves)", partition.last, partition.moves);
    if (what.shape.m > options.check_up_to) continue;
    one.ranks->poison();
    Timing once;
    one.run(once);
    one.partition();
    for (std::uint32_t r = 1; r < one.ranks->world(); ++r) {
      if (auto stats = one.ranks->finish(r); !stats) refuse(one.name, stats.error());
    }
    const bool its = one.ranks->right();
    side["right"] = its;
    right = right && its;
    fmt::print("{}", its ? " right" : " WRONG");
  }
  fmt::print("\n");
  std::fflush(stdout);
  rows.push_back(row);
  return right;
}

int usage() {
  fmt::print(stderr,
             "partition_bench [--op ring|moe|combine]... [--devices D] [--lead L] [--experts E] "
             "[--top-k K] [--hot SHARE] [--planned-for BYTES/s] {}\n",
             Options::kUsage);
  return 2;
}

/// Takes an argument of the program's own.
bool take(Options& options, const std::string& argument, const std::string& value) {
  const bool other = value == "ring" || value == "moe" || value == "combine";
  if (argument == "--op" && other) {
    options.others.push_back(value);
  } else if (argument == "--lead") {
    options.lead = std::atoi(value.c_str());
  } else if (argument == "--experts") {
    options.what.experts = static_cast<std::uint32_t>(std::atoi(value.c_str()));
  } else if (argument == "--top-k") {
    options.what.top_k = static_cast<std::uint32_t>(std::atoi(value.c_str()));
  } else if (argument == "--hot") {
    options.what.hot = std::atof(value.c_str());
  } else if (argument == "--planned-for") {
    options.planned_for = std::atof(value.c_str());
  } else {
    return false;
  }
  return true;
}

int run(int argc, char** argv) {
  Options options;
  const auto own = [&](const std::string& argument, const std::string& value) {
    return take(options, argument, value);
  };
  if (!mk::test::take_all(argc, argv, options, own)) return usage();
  const PartitionCase& what = options.what;
  // A rank's experts have to be enough for a token's choices among them alone.
  if (options.lead < 1 || what.top_k < 1 || what.hot < 0 || what.hot > 1) return usage();
  const bool products = !options.ops.empty() || options.others.empty();
  if (!mk::test::settle_ranks(options)) return 2;
  if (what.experts < options.ranks * what.top_k) return usage();
  const std::unique_ptr<DaemonNodes> daemons = mk::test::daemons_of(options);
  if (!mk::test::has_devices(options)) return 1;
  std::vector<PartitionCase> cases;
  const auto add = [&](const std::string& op, const auto& shapes) {
    for (const mk::test::Shape& shape : shapes) {
      cases.push_back(what);
      cases.back().op = op;
      cases.back().shape = shape;
    }
  };
  for (const mk::test::Op op : options.ops) {
    if (products)
      add(name(op),
          options.shapes.empty() ? mk::test::bench_shapes(op, options.nodes) : options.shapes);
  }
  for (const std::string& op : options.others)
    add(op, options.shapes.empty() ? mk::test::partition_shapes(op) : options.shapes);
  Json rows = Json::array();
  bool right = true;
  for (const PartitionCase& one : cases)
    right = measure(options, one, daemons.get(), rows) && right;
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
