/// \file
/// operators_bench: the operators on GPUs against cuBLAS and NCCL, one rank per GPU of one node (or
/// several ranks on one GPU, without a collective to compare with).
///
///     operators_bench [--op ag_gemm|gemm_rs|gemm_ar]... [--devices D] [--ranks R]
///                     [--shape MxNxK]... [--launches L] [--streams G]... [--chunk BYTES]...
///                     [--compute B] [--check-up-to M] [--json FILE]
///
/// N and K are each rank's: AG+GEMM: B_r is [K, N]; the other two: A_r is [M, K]. All ranks' work
/// of one launch is queued behind a delay, so that it begins together; a launch's time is its
/// slowest rank's. Sides take turns: `fused`; `products`: cuBLAS alone; `collective`: NCCL alone,
/// no NVLS; `baseline`: the two one after the other. Several --streams or --chunk: fused with each,
/// the other sides with the first. Results are checked, every element, up to M rows (8192).
#include <cublas_v2.h>
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
#include <vector>

#include "tests/gpu/nccl.h"
#include "tests/gpu/operator_ranks.h"
#include "tests/gpu/products.h"

namespace {

using mk::test::DeviceMemory;
using mk::test::Job;
using mk::test::JobSetup;
using mk::test::Nccl;
using mk::test::Op;
using mk::test::require;
using Json = nlohmann::ordered_json;

constexpr std::uint64_t kDelayNs = 1'500'000;  ///< longer than it takes to queue all ranks' work

void check(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  fmt::print(stderr, "{}: {}\n", what, cublasGetStatusString(status));
  std::exit(1);
}

struct Options {
  std::vector<Op> ops;
  int devices = 1;
  std::uint32_t ranks = 0;
  std::vector<mk::test::Shape> shapes;
  int launches = 20;
  mk::kernels::CudaOptions cuda;
  std::vector<std::uint32_t> streams;
  std::vector<std::uint32_t> chunks;
  int check_up_to = 8192;
  std::string json;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[values.size() / 2];
}

/// Slowest rank per launch, and each rank's median, in microseconds.
struct Timing {
  std::vector<double> slowest;
  std::vector<std::vector<double>> by_rank;
  double us() const { return median(slowest); }
};

/// The unfused way, one rank per device.
class Baseline {
 public:
  Baseline(Job& job, Nccl* nccl) : job_(job), nccl_(nccl) {
    const JobSetup& setup = job.setup();
    for (std::uint32_t r = 0; r < job.world(); ++r) {
      job.make_current(r);
      cublasHandle_t handle = nullptr;
      check(cublasCreate(&handle), "cublasCreate");
      constexpr std::size_t kWorkspaceBytes = 64u << 20;
      memory_.emplace_back(kWorkspaceBytes);
      check(cublasSetStream(handle, job.stream(r)), "cublasSetStream");
      check(cublasSetWorkspace(handle, memory_.back().data(), kWorkspaceBytes), "workspace");
      handles_.push_back(handle);
      const std::size_t side = setup.op == Op::kAgGemm ? setup.k[0] : setup.n;
      memory_.emplace_back(std::size_t{setup.m} * side * 2);  // gathered A, or the partial C
      whole_.push_back(memory_.back().data());
      memory_.emplace_back(std::size_t{setup.m} * setup.n * 2);
      out_.push_back(memory_.back().data());
    }
  }
  ~Baseline() {
    for (cublasHandle_t handle : handles_) cublasDestroy(handle);
  }
  Baseline(const Baseline&) = delete;
  Baseline& operator=(const Baseline&) = delete;

  void products() {
    const JobSetup& setup = job_.setup();
    const float one = 1, zero = 0;
    for (std::uint32_t r = 0; r < job_.world(); ++r) {
      job_.make_current(r);
      const bool ag = setup.op == Op::kAgGemm;
      const int m = static_cast<int>(setup.m);
      const int n = static_cast<int>(setup.n);
      const int k = static_cast<int>(setup.k[r]);
      check(cublasGemmEx(handles_[r], CUBLAS_OP_T, CUBLAS_OP_N, n, m, k, &one, job_.b(r),
                         CUDA_R_16BF, k, ag ? whole_[r] : job_.a(r), CUDA_R_16BF, k, &zero,
                         ag ? out_[r] : whole_[r], CUDA_R_16BF, n, CUBLAS_COMPUTE_32F,
                         CUBLAS_GEMM_DEFAULT),
            "cublasGemmEx");
    }
  }
  void collective() {
    const JobSetup& setup = job_.setup();
    const std::size_t world = job_.world();
    std::vector<Nccl::Call> calls;
    for (std::uint32_t r = 0; r < world; ++r) {
      if (setup.op == Op::kAgGemm) {
        calls.push_back({job_.a(r), whole_[r], job_.stream(r)});
      } else {
        calls.push_back({whole_[r], out_[r], job_.stream(r)});
      }
    }
    const std::size_t elements =
        std::size_t{setup.m} * (setup.op == Op::kAgGemm ? setup.k[0] : setup.n);
    switch (setup.op) {
      case Op::kAgGemm:
        return nccl_->all_gather(calls, elements / world);
      case Op::kGemmRs:
        return nccl_->reduce_scatter(calls, elements / world);
      case Op::kGemmAr:
        return nccl_->all_reduce(calls, elements);
    }
  }
  void both() {
    if (job_.setup().op == Op::kAgGemm) {
      collective();
      products();
    } else {
      products();
      collective();
    }
  }
  const void* out(std::uint32_t rank) const { return out_[rank]; }

 private:
  Job& job_;
  Nccl* nccl_;
  std::vector<cublasHandle_t> handles_;
  std::vector<DeviceMemory> memory_;
  std::vector<void*> whole_;
  std::vector<void*> out_;
};

/// Begins all ranks' work together, and takes each one's time.
class Stopwatch {
 public:
  explicit Stopwatch(Job& job) : job_(job), begin_(job.world()), end_(job.world()) {
    job.make_current(0);
    require(cudaEventCreateWithFlags(&start_, cudaEventDisableTiming), "event");
    for (std::uint32_t r = 0; r < job.world(); ++r) {
      job.make_current(r);
      require(cudaEventCreate(&begin_[r]), "event");
      require(cudaEventCreate(&end_[r]), "event");
    }
  }
  void run(const std::function<void()>& side, Timing& timing) {
    job_.make_current(0);
    mk::test::delay(kDelayNs, job_.stream(0));
    require(cudaEventRecord(start_, job_.stream(0)), "event");
    for (std::uint32_t r = 0; r < job_.world(); ++r) {
      job_.make_current(r);
      require(cudaStreamWaitEvent(job_.stream(r), start_), "event");
      require(cudaEventRecord(begin_[r], job_.stream(r)), "event");
    }
    side();
    for (std::uint32_t r = 0; r < job_.world(); ++r) {
      job_.make_current(r);
      require(cudaEventRecord(end_[r], job_.stream(r)), "event");
    }
    double slowest = 0;
    timing.by_rank.resize(job_.world());
    for (std::uint32_t r = 0; r < job_.world(); ++r) {
      job_.make_current(r);
      await(r);
      float ms = 0;
      require(cudaEventElapsedTime(&ms, begin_[r], end_[r]), "event");
      timing.by_rank[r].push_back(ms * 1e3);
      slowest = std::max(slowest, ms * 1e3);
    }
    timing.slowest.push_back(slowest);
  }

 private:
  /// Ends the process, with how far everybody has come, when a launch does not end.
  void await(std::uint32_t rank) {
    constexpr std::chrono::seconds kLong{10};
    const auto begin = std::chrono::steady_clock::now();
    cudaError_t state = cudaSuccess;
    while ((state = cudaStreamQuery(job_.stream(rank))) == cudaErrorNotReady) {
      if (std::chrono::steady_clock::now() - begin < kLong) continue;
      for (std::uint32_t r = 0; r < job_.world(); ++r)
        fmt::print(stderr, "{}\n", job_.op(r).progress());
      std::_Exit(1);
    }
    require(state, "launch");
  }

  Job& job_;
  cudaEvent_t start_ = nullptr;
  std::vector<cudaEvent_t> begin_, end_;
};

Json to_json(const Timing& timing) {
  Json ranks = Json::array();
  for (const auto& rank : timing.by_rank) ranks.push_back(median(rank));
  return {{"median", timing.us()},
          {"min", *std::min_element(timing.slowest.begin(), timing.slowest.end())},
          {"max", *std::max_element(timing.slowest.begin(), timing.slowest.end())},
          {"rank_medians", ranks}};
}

/// What one run of fused chooses.
struct Variant {
  std::uint32_t streams;
  std::uint32_t chunk_bytes;
  bool alone;  ///< without the other sides
};

/// One operator at one shape; false: something was wrong.
bool measure(const Options& options, Op op, mk::test::Shape shape, const Variant& variant,
             Nccl* nccl, Json& rows) {
  JobSetup setup;
  setup.op = op;
  setup.locals = options.ranks;
  setup.devices = options.devices;
  setup.m = static_cast<std::uint32_t>(shape.m);
  setup.n = static_cast<std::uint32_t>(shape.n);
  setup.k.assign(options.ranks, static_cast<std::uint32_t>(shape.k));
  setup.options = options.cuda;
  setup.options.wait_timeout = std::chrono::seconds(5);
  setup.options.stream_groups = variant.streams;
  setup.in_workspace = op == Op::kGemmAr;
  setup.chunk_bytes = variant.chunk_bytes;
  Job job(setup);
  for (std::uint32_t r = 0; r < job.world(); ++r) {
    job.fill(r, mk::test::fresh_seed() >> 16);
    job.poison(r);
    require(cudaStreamSynchronize(job.stream(r)), "inputs");
  }
  std::unique_ptr<Baseline> baseline;
  if (!variant.alone) baseline = std::make_unique<Baseline>(job, nccl);
  Stopwatch stopwatch(job);
  const auto fused = [&] {
    for (std::uint32_t r = 0; r < job.world(); ++r) {
      job.make_current(r);
      if (auto launched = job.launch(r, setup.m); !launched) {
        fmt::print(stderr, "{}\n", launched.error().message);
        std::exit(1);
      }
    }
  };
  struct Side {
    const char* name;
    std::function<void()> run;
    Timing timing;
  };
  std::vector<Side> sides;
  sides.push_back({"fused", fused, {}});
  if (!variant.alone) {
    if (nccl != nullptr) {
      sides.push_back({"collective", [&] { baseline->collective(); }, {}});
      sides.push_back({"baseline", [&] { baseline->both(); }, {}});
    }
    sides.push_back({"products", [&] { baseline->products(); }, {}});
  }
  const auto us_of = [&](const std::string& side_name) {
    for (const Side& side : sides) {
      if (side.name == side_name) return side.timing.us();
    }
    return 0.0;
  };
  constexpr int kWarmUp = 3;
  for (int i = 0; i < kWarmUp + options.launches; ++i) {
    if (i == kWarmUp) {
      for (Side& side : sides) side.timing = {};
    }
    for (Side& side : sides) stopwatch.run(side.run, side.timing);
  }
  for (std::uint32_t r = 0; r < job.world(); ++r) {
    job.poison(r);
    require(cudaStreamSynchronize(job.stream(r)), "poison");
  }
  Timing once;
  stopwatch.run(fused, once);
  double gemm_us = 0;
  for (std::uint32_t r = 0; r < job.world(); ++r) {
    auto stats = job.op(r).finish(job.stream(r));
    if (!stats) {
      fmt::print(stderr, "{} {}x{}x{}: {}\n", name(op), shape.m, shape.n, shape.k,
                 stats.error().message);
      return false;
    }
    gemm_us = std::max(gemm_us, static_cast<double>(stats->gemm_ns) / 1e3);
  }
  const bool checks = shape.m <= options.check_up_to;
  mk::test::Verdict verdict;
  if (checks) verdict = job.judge_all(setup.m);
  const double fused_us = us_of("fused");
  const double baseline_us = us_of("baseline");
  const double bound_us = std::max(us_of("products"), us_of("collective"));
  const double flops = 2.0 * shape.m * shape.n * shape.k;
  const auto& blocks = job.op(0).blocks();
  const std::uint32_t streams = std::max(blocks.reduce, blocks.share);
  fmt::print("{} {} x {:5} {:5} {:5} s{:<3} c{:<4}: fused {:8.1f}", name(op), options.ranks,
             shape.m, shape.n, shape.k, streams, variant.chunk_bytes >> 10, fused_us);
  if (!variant.alone) {
    fmt::print(" | cublas {:8.1f} nccl {:8.1f} both {:8.1f} | {:.2f}x, {:.2f} of bound",
               us_of("products"), us_of("collective"), baseline_us, baseline_us / fused_us,
               bound_us / fused_us);
  }
  fmt::print(" | {:.0f} TF, tiles {:.0f}", flops / fused_us / 1e6, gemm_us);
  if (checks) fmt::print(" | {} wrong, {:.2f} of bound", verdict.bad, verdict.worst);
  fmt::print("\n");
  std::fflush(stdout);
  Json row = {{"op", name(op)},
              {"ranks", options.ranks},
              {"devices", options.devices},
              {"m", shape.m},
              {"n_per_rank", shape.n},
              {"k_per_rank", shape.k},
              {"compute_blocks", blocks.compute},
              {"stream_groups", streams},
              {"chunk_bytes", variant.chunk_bytes}};
  for (const Side& side : sides) row[fmt::format("{}_us", side.name)] = to_json(side.timing);
  if (baseline_us > 0) {
    row["speedup"] = baseline_us / fused_us;
    row["of_max_products_collective"] = bound_us / fused_us;
  }
  row["fused_tflops_per_rank"] = flops / fused_us / 1e6;
  if (checks) row["wrong_elements"] = verdict.bad;
  rows.push_back(row);
  return verdict.right();
}

int usage() {
  fmt::print(stderr,
             "operators_bench [--op ag_gemm|gemm_rs|gemm_ar]... [--devices D] [--ranks R] [--shape "
             "MxNxK]... [--launches L] [--streams G]... [--chunk BYTES]... [--compute B] "
             "[--check-up-to M] [--json FILE]\n");
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
    } else if (argument == "--shape") {
      mk::test::Shape shape{};
      if (std::sscanf(value.c_str(), "%dx%dx%d", &shape.m, &shape.n, &shape.k) != 3) return usage();
      options.shapes.push_back(shape);
    } else if (argument == "--launches") {
      options.launches = static_cast<int>(number());
    } else if (argument == "--streams") {
      options.streams.push_back(number());
    } else if (argument == "--compute") {
      options.cuda.compute_blocks = number();
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
  if (options.ops.empty()) options.ops = {Op::kAgGemm, Op::kGemmRs, Op::kGemmAr};
  if (options.ranks == 0) options.ranks = static_cast<std::uint32_t>(options.devices);
  options.devices = std::min(options.devices, static_cast<int>(options.ranks));
  std::unique_ptr<Nccl> nccl;
  if (options.devices > 1 && options.devices == static_cast<int>(options.ranks))
    nccl = Nccl::load(options.devices);
  Json rows = Json::array();
  bool right = true;
  for (const Op op : options.ops) {
    std::vector<mk::test::Shape> shapes = options.shapes;
    if (shapes.empty()) {
      // A layer of width 8192 and 57344 (AG+GEMM) or 28672 dealt out over eight ranks; then square
      // products, dealt out.
      for (const int m : {2048, 4096, 8192, 16384, 32768}) {
        shapes.push_back(op == Op::kAgGemm ? mk::test::Shape{m, 7168, 8192}
                                           : mk::test::Shape{m, 8192, 3584});
      }
      for (const int m : {4096, 8192, 16384, 32768}) {
        shapes.push_back(op == Op::kAgGemm ? mk::test::Shape{m, m / 8, m}
                                           : mk::test::Shape{m, m, m / 8});
      }
    }
    for (const mk::test::Shape& shape : shapes) {
      bool first = true;
      for (const std::uint32_t streams : options.streams) {
        for (const std::uint32_t chunk : options.chunks) {
          right = measure(options, op, shape, {streams, chunk, !first}, nccl.get(), rows) && right;
          first = false;
        }
      }
    }
  }
  if (!options.json.empty()) {
    cudaDeviceProp properties{};
    require(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
    const Json document = {
        {"bench", "operators_bench"},
        {"gpu", properties.name},
        {"devices", options.devices},
        {"ranks", "of one process, a stream each"},
        {"inputs", "standard normal, fresh seed, bf16, B as [N,K]"},
        {"result", "GEMM+AR: read in the workspace (output()); the others: the caller's memory"},
        {"times", "us; slowest rank of a launch, begun together; sides take turns"},
        {"baseline", nccl != nullptr ? "cublasGemmEx and NCCL (no NVLS) one after the other" : ""},
        {"rows", rows}};
    std::ofstream file(options.json);
    file << document.dump(1) << "\n";
    if (!file) return 1;
  }
  return right ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) { return run(argc, argv); }
