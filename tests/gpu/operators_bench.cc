/// \file
/// operators_bench: the operators on GPUs against cuBLAS and collectives, one rank per GPU (or
/// several ranks on one GPU, without a collective to compare with).
///
///     operators_bench [--op ag_gemm|gemm_rs|gemm_ar]... [--devices D] [--ranks R]
///                     [--nodes 2 [--mkerneld PROGRAM] [--link-bandwidth 50GB/s]
///                      [--piece BYTES]...]
///                     [--shape MxNxK]... [--launches L] [--alone SECONDS] [--streams G]...
///                     [--chunk BYTES]... [--receive G]... [--compute B] [--dma on|off]
///                     [--dma-bytes BYTES] [--sums-once on|off] [--spans on|off]
///                     [--piece-ns NS] [--check-up-to M]
///                     [--json FILE]
///
/// N and K are each rank's: AG+GEMM: B_r is [K, N]; the other two: A_r is [M, K]. All ranks' work
/// of one launch is held until all of it is queued, so that it begins together. A launch's time
/// is its slowest rank's. Variants run interleaved in random order. So all see the same GPU
/// clock: `fused`; `products`: cuBLAS alone; `collective`: that alone; `baseline`: the two one
/// after the other. On one node the collective is NCCL's, without NVLS. On two, joined by daemons
/// of PROGRAM (without it, by daemons in this process: for ranks that share a GPU) over the paced
/// loopback fabric, it is unfused.h's, in pieces of each --piece (the fastest counts; several
/// ranks of a node that share GPUs have none). `unfused` is the operator's own unfused form.
/// Interleaved all sides run at one clock. So a side that needs less power is no faster; --alone:
/// on one node, fused, cuBLAS and the baseline also each for so long (5 s at most) without a
/// pause, at their own. Several --streams, --chunk or --receive: fused with each, the other sides
/// with the first. --dma: whether the rows of AG+GEMM are shared by DMA engines
/// (CudaOptions::dma), --sums-once: whether a shard of GEMM+RS is summed once
/// (CudaOptions::sums_once), where the operator does not choose. Results are checked, every
/// element, up to M rows (8192).
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "tests/gpu/bench_devices.h"
#include "tests/gpu/bound.h"
#include "tests/gpu/daemon_nodes.h"
#include "tests/gpu/nccl.h"
#include "tests/gpu/operator_ranks.h"
#include "tests/gpu/products.h"
#include "tests/gpu/sides.h"
#include "tests/gpu/stopwatch.h"
#include "tests/gpu/unfused.h"

namespace {

using mk::test::BenchRun;
using mk::test::Bound;
using mk::test::bound_of;
using mk::test::DaemonNodes;
using mk::test::Job;
using mk::test::JobSetup;
using mk::test::Nccl;
using mk::test::Op;
using mk::test::require;
using mk::test::Side;
using mk::test::Sides;
using mk::test::Stopwatch;
using mk::test::Timing;
using mk::test::Unfused;
using mk::test::UnfusedOverNccl;
using mk::test::UnfusedOverNodes;
using Json = nlohmann::ordered_json;

struct Options : mk::test::DeviceOptions {
  std::vector<std::uint32_t> pieces;
  double alone_seconds = 0;  ///< of each side; 0: only interleaved
};

/// What the runs of this process have in common.
struct Machine {
  std::vector<std::unique_ptr<Nccl>> nccl;  ///< by node; none: no collective
  std::unique_ptr<DaemonNodes> daemons;     ///< of several nodes
};

Json to_json(const Timing& timing) {
  Json ranks = Json::array();
  for (const auto& rank : timing.by_rank) ranks.push_back(mk::test::median(rank));
  Json json = mk::test::summary_of(timing.slowest);
  json["rank_medians"] = ranks;
  return json;
}

/// False: something was wrong.
bool measure(const Options& options, const BenchRun& run, Machine& machine, Json& rows) {
  const Op op = run.op;
  const mk::test::Shape shape = run.shape;
  JobSetup setup = mk::test::setup_of(options, run);
  setup.devices = options.devices;
  setup.in_workspace = op == Op::kGemmAr;
  setup.join = mk::test::join_of(machine.daemons.get());
  Job job(setup);
  // Of a gather over nodes both, as its baseline's source lies in memory the daemons know.
  const bool in_place = op == Op::kAgGemm && options.nodes > 1;
  for (std::uint32_t r = 0; r < job.world(); ++r) {
    const std::uint64_t seed = mk::test::fresh_seed() >> 16;
    job.fill(r, seed);
    if (in_place) {
      job.set_in_workspace(true);
      job.fill(r, seed);
      job.set_in_workspace(false);
    }
    job.poison(r);
    require(cudaStreamSynchronize(job.stream(r)), "inputs");
  }
  Stopwatch stopwatch(job);
  // The forms of the baseline, in pieces of different sizes.
  std::vector<std::unique_ptr<Unfused>> forms;
  if (!run.first) {
    // Without any: the other sides are the same.
  } else if (machine.daemons != nullptr && !machine.nccl.empty()) {
    std::vector<Nccl*> nccl;
    for (const auto& one : machine.nccl) nccl.push_back(one.get());
    std::uint32_t before = 0;
    for (const std::uint32_t bytes : options.pieces) {
      auto form = std::make_unique<UnfusedOverNodes>(job, *machine.daemons, nccl, bytes);
      if (std::exchange(before, form->pieces()) != form->pieces()) forms.push_back(std::move(form));
    }
  } else if (!machine.nccl.empty()) {
    forms.push_back(std::make_unique<UnfusedOverNccl>(job, *machine.nccl[0]));
  } else {
    forms.push_back(std::make_unique<Unfused>(job));
  }
  Sides sides(job, in_place, std::move(forms));
  sides.take_turns(stopwatch, options.launches);
  if (options.alone_seconds > 0) sides.endure(stopwatch, options.alone_seconds);
  const bool checks = shape.m <= options.check_up_to;
  mk::test::Verdict verdict;
  const auto check = [&](const std::function<void()>& form) {
    for (std::uint32_t r = 0; r < job.world(); ++r) {
      job.poison(r);
      require(cudaStreamSynchronize(job.stream(r)), "poison");
    }
    Timing once;
    stopwatch.run(form, once);
    if (checks) verdict.include(job.judge_all(setup.m));
  };
  if (in_place) check([&] { sides.run_in_place(); });
  check([&] { sides.run_fused(); });
  double gemm_us = 0;
  std::string ends;  // when rank 0's roles were done with the last launch
  for (std::uint32_t r = 0; r < job.world(); ++r) {
    auto stats = job.op(r).finish(job.stream(r));
    if (!stats) {
      fmt::print(stderr, "{} {}x{}x{}: {}\n", name(op), shape.m, shape.n, shape.k,
                 stats.error().message);
      return false;
    }
    gemm_us = std::max(gemm_us, static_cast<double>(stats->gemm_ns) / 1e3);
    if (r == 0)
      ends = fmt::format("{} end {}", mk::test::role_ends(*stats), stats->total_ns / 1000);
  }
  const bool came = sides.right();
  const double fused_us = sides.us("fused");
  const double baseline_us = sides.us("baseline");
  const Bound bound = bound_of(setup, options.link_bytes_per_s);
  // On one node, as ever, what was measured of both.
  const double bound_us = std::max(
      sides.us("products"),
      options.nodes == 1 ? sides.us("collective") : std::max(bound.network_us, bound.nvlink_us));
  const double flops = 2.0 * shape.m * shape.n * shape.k;
  fmt::print("{} {}x{} {:5} {:5} {:5} s{:<3} r{:<3} c{:<4}: fused {:8.1f}", name(op), options.nodes,
             setup.locals, shape.m, shape.n, shape.k, job.op(0).stream_groups(),
             job.op(0).blocks().receive, run.chunk_bytes >> 10, fused_us);
  if (run.first) {
    fmt::print(" | cublas {:8.1f} coll {:8.1f} both {:8.1f} own {:8.1f} | {:.2f}x, {:.2f} of bound",
               sides.us("products"), sides.us("collective"), baseline_us, sides.us("unfused"),
               baseline_us / fused_us, bound_us / fused_us);
    if (options.nodes > 1)
      fmt::print(" (net {:.0f} nvl {:.0f})", bound.network_us, bound.nvlink_us);
  }
  fmt::print(" | {:.0f} TF, tiles {:.0f}{}", flops / fused_us / 1e6, gemm_us, ends);
  if (in_place)
    fmt::print(" | in place {:.1f}, {:.2f}x", sides.us("in_place"),
               baseline_us / sides.us("in_place"));
  if (options.alone_seconds > 0)
    fmt::print(" | alone {:.1f}, cublas {:.1f} both {:.1f}, {:.2f}x", sides.alone_us("fused"),
               sides.alone_us("products"), sides.alone_us("baseline"),
               sides.alone_us("baseline") / sides.alone_us("fused"));
  if (checks) fmt::print(" | {} wrong, {:.2f} of bound", verdict.bad, verdict.worst);
  if (!came) fmt::print(" | THE BASELINE MISSED FLAGS");
  fmt::print("\n");
  std::fflush(stdout);
  Json row = mk::test::row_of(options, run, job.op(0));
  row["devices"] = options.devices;
  for (const char* what : {"fused", "in_place", "unfused", "products", "collective", "baseline"}) {
    const Side* const side = sides.find(what);
    if (side == nullptr) continue;
    row[fmt::format("{}_us", what)] = to_json(side->by_turns);
    if (!side->alone.slowest.empty())
      row["alone"][fmt::format("{}_us", what)] = to_json(side->alone);
  }
  if (baseline_us > 0) {
    row["speedup"] = baseline_us / fused_us;
    row[options.nodes == 1 ? "of_max_products_collective" : "of_max_products_nvlink_network"] =
        bound_us / fused_us;
    if (options.alone_seconds > 0)
      row["alone"]["speedup"] = sides.alone_us("baseline") / sides.alone_us("fused");
    if (in_place) row["speedup_in_place"] = baseline_us / sides.us("in_place");
  }
  if (options.nodes > 1) {
    row["network_us"] = bound.network_us;
    row["nvlink_us"] = bound.nvlink_us;
  }
  row["fused_tflops_per_rank"] = flops / fused_us / 1e6;
  if (checks) row["wrong_elements"] = verdict.bad;
  rows.push_back(row);
  return verdict.right() && came;
}

int usage() {
  fmt::print(stderr, "operators_bench [--devices D] [--piece BYTES]... [--alone SECONDS] {}\n",
             Options::kUsage);
  return 2;
}

int run(int argc, char** argv) {
  Options options;
  bool makes_sense = true;
  const auto own = [&](const std::string& argument, const std::string& value) {
    if (argument == "--piece") {
      options.pieces.push_back(static_cast<std::uint32_t>(std::atoi(value.c_str())));
    } else if (argument == "--alone") {
      // What is queued is awaited for ten seconds (stopwatch.cc).
      constexpr double kAloneMax = 5;
      options.alone_seconds = std::atof(value.c_str());
      makes_sense = options.alone_seconds > 0 && options.alone_seconds <= kAloneMax;
    } else {
      return false;
    }
    return true;
  };
  if (!mk::test::take_all(argc, argv, options, own) || !makes_sense) return usage();
  if (options.pieces.empty()) options.pieces = {2 << 20, 8 << 20};
  if (!mk::test::settle_ranks(options)) return 2;
  if (options.alone_seconds > 0 && options.nodes > 1) {
    fmt::print(stderr,
               "--alone is for one node: the unfused form of two lets its own "
               "next launch overwrite what it has not read\n");
    return 2;
  }
  if (options.nodes > 2) return usage();
  const std::uint32_t locals = options.locals();
  Machine machine;
  machine.daemons = mk::test::daemons_of(options);
  if (!mk::test::has_devices(options)) return 1;
  // A node's ranks must have a device each. (Of one rank alone NCCL does nothing but copies.)
  const bool has_collective =
      locals <= static_cast<std::uint32_t>(options.devices) && options.ranks > 1;
  for (std::uint32_t node = 0; node < options.nodes && has_collective; ++node) {
    std::vector<int> devices;
    for (std::uint32_t local = 0; local < locals; ++local)
      devices.push_back(static_cast<int>(node * locals + local) % options.devices);
    auto nccl = Nccl::load(devices);
    if (nccl != nullptr) machine.nccl.push_back(std::move(nccl));
  }
  if (options.nodes > 1 && has_collective && machine.nccl.empty()) {
    fmt::print(stderr, "no libnccl.so.2: nothing to compare several nodes with\n");
    return 1;
  }
  Json rows = Json::array();
  const bool right = mk::test::run_all(
      options, [&](const BenchRun& one) { return measure(options, one, machine, rows); });
  if (!options.json.empty()) {
    const char* const baseline =
        machine.nccl.empty() ? ""
        : options.nodes == 1
            ? "cublasGemmEx and NCCL (no NVLS) one after the other"
            : "cublasGemmEx and, one after the other, NCCL (no NVLS) in each node with the "
              "daemons' "
              "rails between them, in pieces that follow each other (tests/gpu/unfused.h)";
    std::string times = "us; slowest rank of a launch, begun together; interleaved in random order";
    if (options.alone_seconds > 0) {
      times += fmt::format(
          "; alone: each side {} s without a pause, three times after as long to settle",
          options.alone_seconds);
    }
    Json document = mk::test::document_of(options, "operators_bench", argc, argv, options.devices);
    document["ranks"] = "of one process, a stream each";
    document["memory"] =
        "GEMM+AR: C read in the workspace (output()); AG+GEMM, in_place: A in the workspace "
        "(input()); else the caller's";
    document["times"] = times;
    document["baseline"] = baseline;
    document["network"] =
        network_of(options, options.mkerneld.empty() ? "in this process" : "beside it");
    document["rows"] = rows;
    if (!mk::test::write(options, document)) return 1;
  }
  return right ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) { return run(argc, argv); }
