/// \file
/// operators_bench: the operators on GPUs against cuBLAS and collectives, one rank per GPU (or
/// several ranks on one GPU, without a collective to compare with).
///
///     operators_bench [--op ag_gemm|gemm_rs|gemm_ar]... [--devices D] [--ranks R]
///                     [--nodes 2 [--mkerneld PROGRAM] [--link-bandwidth 50GB/s]
///                      [--piece BYTES]...]
///                     [--shape MxNxK]... [--launches L] [--alone SECONDS] [--streams G]...
///                     [--chunk BYTES]... [--receive G]... [--compute B] [--spare on|off]
///                     [--check-up-to M] [--json FILE]
///
/// N and K are each rank's: AG+GEMM: B_r is [K, N]; the other two: A_r is [M, K]. All ranks' work
/// of one launch is held until all of it is queued, so that it begins together; a launch's time is
/// its slowest rank's. Sides take turns: `fused`; `products`: cuBLAS alone; `collective`: that
/// alone; `baseline`: the two one after the other. On one node the collective is NCCL's, without
/// NVLS; on two, joined by daemons of PROGRAM (without it, by daemons in this process: for ranks
/// that share a GPU) over the paced loopback fabric, it is unfused.h's, in pieces of each --piece
/// (the fastest counts; several ranks of a node that share GPUs have none). `unfused` is the
/// operator's own unfused form. By turns all sides run at one clock, so a side that needs less
/// power is no faster; --alone: on one node, fused, cuBLAS and the baseline also each for so long
/// (5 s at most) without a pause, at their own. Several --streams, --chunk or --receive: fused with
/// each, the other sides with the first. --spare: whether the rows of AG+GEMM are shared by the
/// compute blocks' spare warps (CudaOptions::spare_warps), where the operator does not choose.
/// Results are checked, every element, up to M rows (8192).
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "daemon/config/units.h"
#include "tests/gpu/bench_shapes.h"
#include "tests/gpu/bound.h"
#include "tests/gpu/daemon_nodes.h"
#include "tests/gpu/devices.h"
#include "tests/gpu/nccl.h"
#include "tests/gpu/operator_ranks.h"
#include "tests/gpu/products.h"
#include "tests/gpu/sides.h"
#include "tests/gpu/stopwatch.h"
#include "tests/gpu/unfused.h"

namespace {

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

struct Options {
  std::vector<Op> ops;
  int devices = 1;
  std::uint32_t ranks = 0;
  std::uint32_t nodes = 1;
  std::string mkerneld;
  std::string link_bandwidth = "50GB/s";
  double link_bytes_per_s = 0;  ///< the same
  std::vector<std::uint32_t> pieces;
  std::vector<mk::test::Shape> shapes;
  int launches = 20;
  double alone_seconds = 0;  ///< of each side; 0: only by turns
  mk::kernels::CudaOptions cuda;
  std::vector<std::uint32_t> streams;
  std::vector<std::uint32_t> chunks;
  std::vector<std::uint32_t> receives;
  int check_up_to = 8192;
  std::string json;
};

/// What the runs of this process have in common.
struct Machine {
  std::vector<std::unique_ptr<Nccl>> nccl;  ///< by node; none: no collective
  std::unique_ptr<DaemonNodes> daemons;     ///< of several nodes
};

Json to_json(const Timing& timing) {
  Json ranks = Json::array();
  for (const auto& rank : timing.by_rank) ranks.push_back(mk::test::median(rank));
  return {{"median", timing.us()},
          {"min", *std::min_element(timing.slowest.begin(), timing.slowest.end())},
          {"max", *std::max_element(timing.slowest.begin(), timing.slowest.end())},
          {"rank_medians", ranks}};
}

/// What one run of fused chooses.
struct Variant {
  std::uint32_t streams;
  std::uint32_t chunk_bytes;
  std::uint32_t receives;
  bool only_fused;  ///< without the other sides
};

/// One operator at one shape; false: something was wrong.
bool measure(const Options& options, Op op, mk::test::Shape shape, const Variant& variant,
             Machine& machine, Json& rows) {
  JobSetup setup;
  setup.op = op;
  setup.nodes = options.nodes;
  setup.locals = options.ranks / options.nodes;
  setup.devices = options.devices;
  setup.m = static_cast<std::uint32_t>(shape.m);
  setup.n = static_cast<std::uint32_t>(shape.n);
  setup.k.assign(options.ranks, static_cast<std::uint32_t>(shape.k));
  setup.options = options.cuda;
  setup.options.wait_timeout = std::chrono::seconds(5);
  setup.options.stream_groups = variant.streams;
  setup.options.receive_groups = variant.receives;
  setup.in_workspace = op == Op::kGemmAr;
  setup.chunk_bytes = variant.chunk_bytes;
  if (machine.daemons != nullptr) {
    machine.daemons->attach();
    setup.join = [&](std::uint64_t bytes, std::uint32_t flags) {
      return machine.daemons->memory(bytes, flags);
    };
  }
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
  if (variant.only_fused) {
    // Without any.
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
    for (const auto role : {mk::kernels::Role::kShare, mk::kernels::Role::kReduce,
                            mk::kernels::Role::kSend, mk::kernels::Role::kReceive}) {
      const auto& done = stats->role(role);
      if (r == 0 && done.blocks != 0)
        ends += fmt::format(" {} {}", name_of(role), done.end_ns / 1000);
    }
    if (r == 0) ends += fmt::format(" end {}", stats->total_ns / 1000);
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
  const auto& blocks = job.op(0).blocks();
  const std::uint32_t spare = job.op(0).spare_sharers();
  const std::uint32_t streams = std::max(blocks.reduce, blocks.share - spare);
  fmt::print("{} {}x{} {:5} {:5} {:5} s{:<3} r{:<3} c{:<4}: fused {:8.1f}", name(op), options.nodes,
             setup.locals, shape.m, shape.n, shape.k, streams, blocks.receive,
             variant.chunk_bytes >> 10, fused_us);
  if (!variant.only_fused) {
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
  Json row = {{"op", name(op)},
              {"nodes", options.nodes},
              {"ranks", options.ranks},
              {"devices", options.devices},
              {"m", shape.m},
              {"n_per_rank", shape.n},
              {"k_per_rank", shape.k},
              {"compute_blocks", blocks.compute},
              {"stream_groups", streams},
              {"spare_warps", spare},
              {"receive_groups", blocks.receive},
              {"chunk_bytes", variant.chunk_bytes}};
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
  fmt::print(
      stderr,
      "operators_bench [--op ag_gemm|gemm_rs|gemm_ar]... [--devices D] [--ranks R] [--nodes 2 "
      "[--mkerneld PROGRAM] [--link-bandwidth 50GB/s] [--piece BYTES]...] [--shape MxNxK]... "
      "[--launches L] [--alone SECONDS] [--streams G]... [--chunk BYTES]... [--receive G]... "
      "[--compute B] "
      "[--spare on|off] [--check-up-to M] [--json FILE]\n");
  return 2;
}

int run(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (i + 1 == argc) return usage();
    const std::string value = argv[++i];
    const auto number = [&] { return static_cast<std::uint32_t>(std::atoi(value.c_str())); };
    if (argument == "--op") {
      for (const Op op : {Op::kAgGemm, Op::kGemmRs, Op::kGemmAr}) {
        if (value == name(op)) options.ops.push_back(op);
      }
    } else if (argument == "--devices") {
      options.devices = static_cast<int>(number());
    } else if (argument == "--ranks") {
      options.ranks = number();
    } else if (argument == "--nodes") {
      options.nodes = number();
    } else if (argument == "--mkerneld") {
      options.mkerneld = value;
    } else if (argument == "--link-bandwidth") {
      options.link_bandwidth = value;
    } else if (argument == "--piece") {
      options.pieces.push_back(number());
    } else if (argument == "--receive") {
      options.receives.push_back(number());
    } else if (argument == "--shape") {
      mk::test::Shape shape{};
      if (std::sscanf(value.c_str(), "%dx%dx%d", &shape.m, &shape.n, &shape.k) != 3) return usage();
      options.shapes.push_back(shape);
    } else if (argument == "--launches") {
      options.launches = static_cast<int>(number());
    } else if (argument == "--alone") {
      // What is queued is awaited for ten seconds (stopwatch.cc).
      constexpr double kAloneMax = 5;
      options.alone_seconds = std::atof(value.c_str());
      if (!(options.alone_seconds > 0 && options.alone_seconds <= kAloneMax)) return usage();
    } else if (argument == "--streams") {
      options.streams.push_back(number());
    } else if (argument == "--compute") {
      options.cuda.compute_blocks = number();
    } else if (argument == "--spare") {
      if (value != "on" && value != "off") return usage();
      options.cuda.spare_warps = value == "on";
    } else if (argument == "--chunk") {
      options.chunks.push_back(number());
    } else if (argument == "--check-up-to") {
      options.check_up_to = static_cast<int>(number());
    } else if (argument == "--json") {
      options.json = value;
    } else {
      return usage();
    }
  }
  if (options.streams.empty()) options.streams = {0};
  if (options.chunks.empty()) options.chunks = {0};
  if (options.receives.empty()) options.receives = {0};
  if (options.pieces.empty()) options.pieces = {2 << 20, 8 << 20};
  if (options.ops.empty()) options.ops = {Op::kAgGemm, Op::kGemmRs, Op::kGemmAr};
  if (options.devices < 1 || options.nodes < 1) return usage();
  const auto link = mk::daemon::parse_bandwidth(options.link_bandwidth);
  if (!link) {
    fmt::print(stderr, "--link-bandwidth: {}\n", link.error().message);
    return 2;
  }
  options.link_bytes_per_s = *link;
  if (options.ranks == 0) options.ranks = static_cast<std::uint32_t>(options.devices);
  options.devices = std::min(options.devices, static_cast<int>(options.ranks));
  if (options.alone_seconds > 0 && options.nodes > 1) {
    fmt::print(stderr,
               "--alone is for one node: the unfused form of two lets its own "
               "next launch overwrite what it has not read\n");
    return 2;
  }
  if (options.ranks % options.nodes != 0) {
    fmt::print(stderr, "{} ranks do not divide evenly into {} nodes\n", options.ranks,
               options.nodes);
    return 2;
  }
  const std::uint32_t locals = options.ranks / options.nodes;
  Machine machine;
  if (options.nodes > 1) {
    if (options.nodes != 2) return usage();
    // Before this process asks CUDA anything: with the first question it settles how many
    // connections there are.
    machine.daemons = std::make_unique<DaemonNodes>(
        options.nodes, locals,
        mk::test::dealt_out(options.ranks, static_cast<std::uint32_t>(options.devices)),
        options.mkerneld, options.link_bandwidth);
  }
  if (options.devices > mk::test::device_count()) {
    fmt::print(stderr, "{} devices are asked for, and {} are there\n", options.devices,
               mk::test::device_count());
    return 1;
  }
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
  bool right = true;
  for (const Op op : options.ops) {
    std::vector<mk::test::Shape> shapes = options.shapes;
    if (shapes.empty()) shapes = mk::test::bench_shapes(op, options.nodes);
    for (const mk::test::Shape& shape : shapes) {
      bool first = true;
      for (const std::uint32_t streams : options.streams) {
        for (const std::uint32_t chunk : options.chunks) {
          for (const std::uint32_t receive : options.receives) {
            const Variant variant{streams, chunk, receive, !first};
            right = measure(options, op, shape, variant, machine, rows) && right;
            first = false;
          }
        }
      }
    }
  }
  if (!options.json.empty()) {
    cudaDeviceProp properties{};
    require(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
    const char* const baseline =
        machine.nccl.empty() ? ""
        : options.nodes == 1
            ? "cublasGemmEx and NCCL (no NVLS) one after the other"
            : "cublasGemmEx and, one after the other, NCCL (no NVLS) in each node with the "
              "daemons' "
              "rails between them, in pieces that follow each other (tests/gpu/unfused.h)";
    std::string times = "us; slowest rank of a launch, begun together; sides take turns";
    if (options.alone_seconds > 0) {
      times += fmt::format(
          "; alone: each side {} s without a pause, three times after as long to settle",
          options.alone_seconds);
    }
    std::string command = "operators_bench";
    for (int i = 1; i < argc; ++i) command += std::string(" ") + argv[i];
    const Json document = {
        {"bench", "operators_bench"},
        {"command", command},
        {"checked", fmt::format("every element of the rows up to M {}, float64 on the GPUs",
                                options.check_up_to)},
        {"gpu", properties.name},
        {"devices", options.devices},
        {"ranks", "of one process, a stream each"},
        {"inputs", "standard normal, fresh seed, bf16, B as [N,K]"},
        {"memory",
         "GEMM+AR: C read in the workspace (output()); AG+GEMM, in_place: A in the workspace "
         "(input()); else the caller's"},
        {"times", times},
        {"baseline", baseline},
        {"network",
         options.nodes == 1
             ? "none"
             : fmt::format("loopback, GPU memory, {} per rail, daemons {}", options.link_bandwidth,
                           options.mkerneld.empty() ? "in this process" : "beside it")},
        {"rows", rows}};
    std::ofstream file(options.json);
    file << document.dump(1) << "\n";
    if (!file) return 1;
  }
  return right ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) { return run(argc, argv); }
