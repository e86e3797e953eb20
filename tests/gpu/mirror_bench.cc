/// \file
/// mirror_bench: an operator of more ranks than there are GPUs, on two: rank 0 on the first, its
/// node's others (and of two nodes the other one's) played by the second (mirror.h).
///
///     mirror_bench [--ranks R] [--nodes 2 --mkerneld PROGRAM [--link-bandwidth 50GB/s]]
///                  [--op ag_gemm|gemm_rs|gemm_ar]... [--shape MxNxK]... [--launches N]
///                  [--streams G]... [--chunk BYTES]... [--receive G]... [--compute B]
///                  [--dma on|off] [--dma-bytes BYTES] [--sums-once on|off] [--piece-ns NS]
///                  [--check-up-to M]
///                  [--json FILE]
///
/// R: of all nodes. Shapes are those of operators_bench. Interleaved: the rank's launch (of a
/// gather over nodes also with its rows in place), and its product by cuBLAS. A collective of R
/// ranks there is none. What rank 0 sends to the other node goes through daemons of PROGRAM, paced.
/// Results are checked, every element, up to M rows (8192).
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/gpu/bench_options.h"
#include "tests/gpu/bound.h"
#include "tests/gpu/cublas.h"
#include "tests/gpu/daemon_nodes.h"
#include "tests/gpu/devices.h"
#include "tests/gpu/mirrored_rank.h"
#include "tests/gpu/stopwatch.h"

namespace {

using mk::test::BenchOptions;
using mk::test::BenchRun;
using mk::test::JobSetup;
using mk::test::MirroredRank;
using mk::test::Op;
using mk::test::require;
using mk::test::Shape;
using mk::test::Stopwatch;
using mk::test::Timing;
using Json = nlohmann::ordered_json;

/// The rank's own times; the mirror's, which ends a little later, don't count.
Json to_json(const Timing& timing) { return mk::test::summary_of(timing.by_rank[0]); }

/// False: something was wrong.
bool measure(const BenchOptions& options, const BenchRun& run, mk::test::DaemonNodes* daemons,
             Json& rows) {
  const Op op = run.op;
  const Shape shape = run.shape;
  const JobSetup setup = mk::test::setup_of(options, run);
  MirroredRank rank(setup, daemons, mk::test::fresh_seed() >> 16);
  const bool in_place = op == Op::kAgGemm && options.nodes > 1;
  require(cudaSetDevice(0), "cudaSetDevice");
  mk::test::Cublas cublas(rank.stream());
  using mk::kernels::kElementBytes;
  // The whole A, or the partial C, whose size alone matters here.
  const mk::test::DeviceMemory whole(
      std::size_t(shape.m) * std::size_t(op == Op::kAgGemm ? shape.k : shape.n) * kElementBytes);
  const mk::test::DeviceMemory product(std::size_t(shape.m) * std::size_t(shape.n) * kElementBytes);
  if (op == Op::kAgGemm)
    mk::test::fill_normal(whole.data(), mk::kernels::cuda::DType::kBf16,
                          std::int64_t{shape.m} * shape.k, mk::test::fresh_seed(), rank.stream());
  const std::vector<mk::test::TimedStream> streams_timed = {
      {0, rank.stream()}, {rank.mirror().device(), rank.mirror().stream()}};
  Stopwatch stopwatch(streams_timed, [&] { fmt::print(stderr, "{}\n", rank.op().progress()); });
  Timing fused, placed, products;
  std::vector<mk::test::Turn> turns = {{[&] { rank.launch(); }, &fused}};
  if (in_place) turns.push_back({[&] { rank.launch(true); }, &placed});
  turns.push_back({[&] {
                     require(cudaSetDevice(0), "cudaSetDevice");
                     cublas.multiply(shape, op == Op::kAgGemm ? whole.data() : rank.a(), rank.b(),
                                     product.data());
                   },
                   &products});
  stopwatch.take_turns(turns, options.launches);
  const bool checks = shape.m <= options.check_up_to;
  mk::test::Verdict verdict;
  std::string mirrored;
  double lag_us = 0;
  for (const bool placed_now : {true, false}) {
    if (placed_now && !in_place) continue;
    rank.poison();
    Timing once;
    stopwatch.run([&] { rank.launch(placed_now); }, once);
    if (checks) verdict.include(rank.judge());
    const mk::test::MirrorTimes times = rank.mirror().times();
    lag_us = times.lag_us();
    mirrored += placed_now ? " | in place, mirror" : " | mirror";
    for (const auto& list : times.lists) {
      if (list.count != 0)
        mirrored += fmt::format(" {:.0f}-{:.0f}", times.since_begin_us(~list.first_seen_inverted),
                                times.since_begin_us(list.last_seen));
    }
  }
  const bool saw_all = rank.mirror().saw_all();
  auto stats = rank.op().finish(rank.stream());
  if (!stats) {
    fmt::print(stderr, "{} {}x{}x{}: {}\n", name(op), shape.m, shape.n, shape.k,
               stats.error().message);
    return false;
  }
  const double fused_us = mk::test::median(fused.by_rank[0]);
  const double products_us = mk::test::median(products.by_rank[0]);
  const mk::test::Bound bound = mk::test::bound_of(setup, options.link_bytes_per_s);
  const double bound_us = std::max({products_us, bound.nvlink_us, bound.network_us});
  const auto& blocks = rank.op().blocks();
  const auto& compute = stats->role(mk::kernels::Role::kCompute);
  const double waited_us = static_cast<double>(compute.wait_ns) / 1e3 / blocks.compute;
  fmt::print(
      "{} 1 of {}x{}: {:5} {:5} {:5} s{:<3} r{:<3} c{:<4}: fused {:8.1f} | cublas {:8.1f} nvlink "
      "{:.0f} network {:.0f} | {:.2f} of bound | tiles {:.0f} waited {:.0f}{} end {}",
      name(op), setup.nodes, setup.locals, shape.m, shape.n, shape.k, rank.op().stream_groups(),
      blocks.receive, run.chunk_bytes >> 10, fused_us, products_us, bound.nvlink_us,
      bound.network_us, bound_us / fused_us, static_cast<double>(stats->gemm_ns) / 1e3, waited_us,
      mk::test::role_ends(*stats), stats->total_ns / 1000);
  if (in_place) fmt::print(" | in place {:.1f}", mk::test::median(placed.by_rank[0]));
  fmt::print("{}, lag {:.1f}", mirrored, lag_us);
  if (checks) fmt::print(" | {} wrong, {:.2f} of bound", verdict.bad, verdict.worst);
  if (!saw_all) fmt::print(" | THE MIRROR MISSED FLAGS");
  fmt::print("\n");
  std::fflush(stdout);
  Json row = mk::test::row_of(options, run, rank.op());
  row["fused_us"] = to_json(fused);
  row["products_us"] = to_json(products);
  row["tiles_waited_us"] = waited_us;
  row["mirror_lag_us"] = lag_us;
  row["nvlink_us"] = bound.nvlink_us;
  row["network_us"] = bound.network_us;
  row["of_max_products_nvlink_network"] = bound_us / fused_us;
  if (in_place) row["in_place_us"] = to_json(placed);
  if (checks) row["wrong_elements"] = verdict.bad;
  rows.push_back(row);
  return verdict.right() && saw_all;
}

int usage() {
  fmt::print(stderr, "mirror_bench {}\n", BenchOptions::kUsage);
  return 2;
}

int run(int argc, char** argv) {
  BenchOptions options;
  options.ranks = 8;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (options.take(argv[i], argv[i + 1]) != BenchOptions::Taken::kYes) return usage();
  }
  if (argc % 2 == 0 || options.nodes < 1 || options.nodes > 2 ||
      options.ranks % options.nodes != 0 || (options.nodes == 2) == options.mkerneld.empty())
    return usage();
  if (!options.settle()) return 2;
  std::unique_ptr<mk::test::DaemonNodes> daemons;
  if (options.nodes == 2) {
    std::vector<int> devices(options.ranks, 1);
    devices[0] = 0;
    daemons = std::make_unique<mk::test::DaemonNodes>(2, options.ranks / 2, devices,
                                                      options.mkerneld, options.link_bandwidth);
  }
  Json rows = Json::array();
  const bool right = mk::test::run_all(
      options, [&](const BenchRun& one) { return measure(options, one, daemons.get(), rows); });
  if (!options.json.empty()) {
    Json document = mk::test::document_of(options, "mirror_bench", argc, argv, 2);
    document["ranks"] =
        fmt::format("rank 0 of {} on one GPU, the others played by the second (tests/gpu/mirror.h)",
                    options.ranks);
    document["times"] = "us; rank 0; interleaved in random order";
    document["network"] = network_of(options, "beside it");
    document["rows"] = rows;
    if (!mk::test::write(options, document)) return 1;
  }
  return right ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) { return run(argc, argv); }
