/// \file
/// gemm_ar_bench: GEMM + AllReduce in one kernel against GEMM, then all-reduce; 2 and 4 ranks on
/// one GPU or several with peer access.
///
///     gemm_ar_bench [--devices D] [--seconds S] [--sweep] [--json FILE]
///
/// Sides, by turns in one run, on the same inputs: `fused`; `unfused mode`, the same kernel with
/// the reduction held back until the rank's product is done; `cuBLAS + reduce`: each rank's product
/// by cuBLAS on the whole GPU (ranks of one GPU one after the other), then, when all are done, one
/// kernel on every whole GPU that reads its share of all partials once and writes it to all ranks'
/// C; `products`: those products alone. --sweep: fused by number of reduce blocks.
#include <cublas_v2.h>
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/gpu/gemm_ar_ranks.h"
#include "tests/gpu/products.h"
#include "tests/gpu/race.h"

namespace {

using mk::kernels::Mode;
using mk::test::DeviceMemory;
using mk::test::GemmArRanks;
using mk::test::Launch;
using mk::test::require;
using mk::test::Shape;
using mk::test::Timing;

void check(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  fmt::print(stderr, "{}: {}\n", what, cublasGetStatusString(status));
  std::exit(1);
}

/// The unfused way, between two points of the null stream; B as [N,K].
class Unfused {
 public:
  Unfused(const mk::test::GemmArProduct& product, int devices)
      : product_(product), devices_(static_cast<std::size_t>(devices)) {
    require(cudaSetDevice(0), "cudaSetDevice");
    require(cudaEventCreateWithFlags(&begin_, cudaEventDisableTiming), "event");
    constexpr std::size_t kWorkspaceBytes = 64u << 20;
    for (std::size_t d = 0; d < devices_.size(); ++d) {
      Device& device = devices_[d];
      require(cudaSetDevice(static_cast<int>(d)), "cudaSetDevice");
      require(cudaStreamCreateWithFlags(&device.stream, cudaStreamNonBlocking), "stream");
      for (auto* event : {&device.multiplied, &device.end})
        require(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "event");
      check(cublasCreate(&device.handle), "cublasCreate");
      check(cublasSetStream(device.handle, device.stream), "cublasSetStream");
      memory_.emplace_back(kWorkspaceBytes);
      check(cublasSetWorkspace(device.handle, memory_.back().data(), kWorkspaceBytes),
            "cublasSetWorkspace");
    }
    parts_.ranks = product.locals;
    for (int r = 0; r < product.locals; ++r) {
      const auto bytes = static_cast<std::size_t>(elements()) * 2;
      require(cudaSetDevice(r % devices), "cudaSetDevice");
      memory_.emplace_back(bytes);
      parts_.parts[r] = memory_.back().data();
      memory_.emplace_back(bytes);
      parts_.outs[r] = memory_.back().data();
    }
    require(cudaSetDevice(0), "cudaSetDevice");
  }
  ~Unfused() {
    cudaDeviceSynchronize();
    for (Device& device : devices_) {
      cublasDestroy(device.handle);
      cudaStreamDestroy(device.stream);
    }
  }
  Unfused(const Unfused&) = delete;
  Unfused& operator=(const Unfused&) = delete;

  void run(bool with_reduce) const {
    const int devices = static_cast<int>(devices_.size());
    require(cudaEventRecord(begin_, nullptr), "event");
    for (int d = 0; d < devices; ++d) {
      const Device& device = devices_[static_cast<std::size_t>(d)];
      require(cudaSetDevice(d), "cudaSetDevice");
      require(cudaStreamWaitEvent(device.stream, begin_), "event");
      for (int r = d; r < product_.locals; r += devices) multiply(device, r);
      require(cudaEventRecord(device.multiplied, device.stream), "event");
    }
    for (int d = 0; d < devices; ++d) {
      const Device& device = devices_[static_cast<std::size_t>(d)];
      require(cudaSetDevice(d), "cudaSetDevice");
      if (with_reduce) {
        for (const Device& other : devices_)
          require(cudaStreamWaitEvent(device.stream, other.multiplied), "event");
        mk::test::AllReduceParts share = parts_;
        const std::int64_t count = elements() / devices / 8 * 8;
        for (int r = 0; r < share.ranks; ++r) {
          share.parts[r] = static_cast<const std::uint16_t*>(share.parts[r]) + d * count;
          share.outs[r] = static_cast<std::uint16_t*>(share.outs[r]) + d * count;
        }
        mk::test::all_reduce(share, count, device.stream);
      }
      require(cudaEventRecord(device.end, device.stream), "event");
    }
    require(cudaSetDevice(0), "cudaSetDevice");
    for (const Device& device : devices_)
      require(cudaStreamWaitEvent(nullptr, device.end), "event");
  }
  const void* out(int rank) const { return parts_.outs[rank]; }

 private:
  struct Device {
    cudaStream_t stream = nullptr;
    cublasHandle_t handle = nullptr;
    cudaEvent_t multiplied = nullptr, end = nullptr;
  };
  std::int64_t elements() const { return std::int64_t{product_.m} * product_.n; }
  void multiply(const Device& device, int r) const {
    const float one = 1, zero = 0;
    check(
        cublasGemmEx(device.handle, CUBLAS_OP_T, CUBLAS_OP_N, product_.n, product_.m, product_.k[r],
                     &one, product_.b[r], CUDA_R_16BF, product_.k[r], product_.a[r], CUDA_R_16BF,
                     product_.k[r], &zero, const_cast<void*>(parts_.parts[r]), CUDA_R_16BF,
                     product_.n, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
        "cublasGemmEx");
  }

  mk::test::GemmArProduct product_;
  std::vector<Device> devices_;
  cudaEvent_t begin_ = nullptr;
  std::vector<DeviceMemory> memory_;
  mk::test::AllReduceParts parts_;
};

/// Launches all ranks between two points of the null stream.
class Together {
 public:
  explicit Together(GemmArRanks& ranks) : ranks_(ranks), ends_(ranks.locals()) {
    ranks.make_current(0);
    require(cudaEventCreateWithFlags(&begin_, cudaEventDisableTiming), "event");
    for (std::uint32_t r = 0; r < ranks.locals(); ++r) {
      ranks.make_current(r);
      require(cudaEventCreateWithFlags(&ends_[r], cudaEventDisableTiming), "event");
    }
    ranks.make_current(0);
  }
  void run(std::uint32_t m, Mode mode) {
    require(cudaEventRecord(begin_, nullptr), "event");
    for (std::uint32_t r = 0; r < ranks_.locals(); ++r) {
      require(cudaStreamWaitEvent(ranks_.stream(r), begin_), "event");
      if (auto launched = ranks_.launch(r, m, false, mode); !launched) {
        fmt::print(stderr, "{}\n", launched.error().message);
        std::exit(1);
      }
      require(cudaEventRecord(ends_[r], ranks_.stream(r)), "event");
    }
    for (auto& end : ends_) require(cudaStreamWaitEvent(nullptr, end), "event");
  }

 private:
  GemmArRanks& ranks_;
  cudaEvent_t begin_ = nullptr;
  std::vector<cudaEvent_t> ends_;
};

std::uint32_t u(int value) { return static_cast<std::uint32_t>(value); }

void sweep(Shape shape, std::uint32_t locals, int devices, double seconds) {
  const double flops = 2.0 * shape.m * shape.n * shape.k * locals;
  fmt::print("{} ranks, {} x {} x {}: fused us by reduce blocks (tiles, sums, all; by rank):",
             locals, shape.m, shape.n, shape.k);
  for (std::uint32_t reduce : {1u, 2u, 4u, 6u, 8u, 12u, 16u, 24u, 32u}) {
    if (reduce * 2 > 132 * static_cast<std::uint32_t>(devices) / locals) continue;
    auto setup = mk::test::gemm_ar_setup(locals, devices, u(shape.m), u(shape.n), u(shape.k));
    setup.reduce_blocks = reduce;
    GemmArRanks ranks(setup);
    for (std::uint32_t r = 0; r < locals; ++r) ranks.fill(r, mk::test::fresh_seed() >> 16);
    for (std::uint32_t r = 0; r < locals; ++r)
      require(cudaStreamSynchronize(ranks.stream(r)), "inputs");
    Together together(ranks);
    const auto timings =
        mk::test::race({[&](int) { together.run(u(shape.m), Mode::kFused); }}, 1, flops, seconds);
    auto stats = ranks.op(0).finish(ranks.stream(0));
    fmt::print("  {}: {:.0f}", reduce, timings[0].median());
    for (std::uint32_t r = 0; r < locals; ++r) {
      stats = ranks.op(r).finish(ranks.stream(r));
      fmt::print(" ({:.0f} {:.0f} {:.0f})", double(stats->gemm_ns) / 1e3,
                 double(stats->role(mk::kernels::Role::kReduce).end_ns) / 1e3,
                 double(stats->total_ns) / 1e3);
    }
  }
  fmt::print("\n");
}

int run(int argc, char** argv) {
  double seconds = 0.15;
  bool sweeps = false;
  int devices = 1;
  std::string json;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--seconds" && i + 1 < argc) {
      seconds = std::atof(argv[++i]);
    } else if (argument == "--devices" && i + 1 < argc) {
      devices = std::atoi(argv[++i]);
    } else if (argument == "--json" && i + 1 < argc) {
      json = argv[++i];
    } else if (argument == "--sweep") {
      sweeps = true;
    } else {
      fmt::print(stderr, "gemm_ar_bench [--devices D] [--seconds S] [--sweep] [--json FILE]\n");
      return 2;
    }
  }
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  bool right = true;
  const auto us = [](const Timing& t) {
    return nlohmann::ordered_json{
        {"median", t.median()}, {"min", t.min()}, {"max", t.max()}, {"samples", t.us.size()}};
  };
  for (std::uint32_t locals : {2u, 4u}) {
    for (const Shape& shape : {Shape{2048, 2048, 1024}, Shape{4096, 4096, 1024},
                               Shape{8192, 8192, 1024}, Shape{8192, 8192, 3584}}) {
      if (sweeps) {
        sweep(shape, locals, devices, seconds / 2);
        continue;
      }
      GemmArRanks ranks(
          mk::test::gemm_ar_setup(locals, devices, u(shape.m), u(shape.n), u(shape.k)));
      for (std::uint32_t r = 0; r < locals; ++r) {
        ranks.fill(r, mk::test::fresh_seed() >> 16);
        ranks.poison(r);
      }
      for (std::uint32_t r = 0; r < locals; ++r)
        require(cudaStreamSynchronize(ranks.stream(r)), "inputs");
      const Unfused unfused(ranks.product(u(shape.m)), devices);
      Together together(ranks);
      const double flops = 2.0 * shape.m * shape.n * shape.k * locals;
      const std::vector<Launch> sides = {[&](int) { together.run(u(shape.m), Mode::kFused); },
                                         [&](int) { together.run(u(shape.m), Mode::kUnfused); },
                                         [&](int) { unfused.run(true); },
                                         [&](int) { unfused.run(false); }};
      const auto timings = mk::test::race(sides, 1, flops, seconds);
      // What was timed is checked: the last side by turns may have been any, so once more, fused.
      for (std::uint32_t r = 0; r < locals; ++r) {
        ranks.poison(r);
        require(cudaStreamSynchronize(ranks.stream(r)), "poison");
      }
      ranks.make_current(0);
      sides[0](0);
      auto stats = ranks.op(0).finish(ranks.stream(0));
      if (!stats) {
        fmt::print(stderr, "{}\n", stats.error().message);
        return 1;
      }
      require(cudaDeviceSynchronize(), "fused");
      const auto verdict = ranks.judge_all(u(shape.m), false);
      const auto theirs =
          mk::test::judge_gemm_ar(ranks.product(u(shape.m)), unfused.out(0), shape.n, nullptr);
      right = right && verdict.right() && theirs.right();
      const double ratio = timings[2].median() / timings[0].median();
      fmt::print(
          "{} ranks {:5} {:5} {:5}: fused {:8.1f} us ({:.1f}..{:.1f}), unfused mode {:8.1f}, "
          "cuBLAS "
          "+ reduce {:8.1f} ({:.1f}..{:.1f}), products alone {:8.1f}; {:.2f}x, {:.0f} TFLOPS; "
          "tiles {:.0f} us, sums {:.0f}; error/bound {:.3f}, wrong {} / {}\n",
          locals, shape.m, shape.n, shape.k, timings[0].median(), timings[0].min(),
          timings[0].max(), timings[1].median(), timings[2].median(), timings[2].min(),
          timings[2].max(), timings[3].median(), ratio, flops / timings[0].median() / 1e6,
          double(stats->gemm_ns) / 1e3,
          double(stats->role(mk::kernels::Role::kReduce).end_ns) / 1e3, verdict.worst, verdict.bad,
          theirs.bad);
      std::fflush(stdout);
      rows.push_back({{"ranks", locals},
                      {"m", shape.m},
                      {"n", shape.n},
                      {"k_per_rank", shape.k},
                      {"compute_blocks", ranks.op(0).compute_blocks()},
                      {"reduce_blocks", ranks.op(0).reduce_blocks()},
                      {"fused_us", us(timings[0])},
                      {"unfused_mode_us", us(timings[1])},
                      {"cublas_then_reduce_us", us(timings[2])},
                      {"cublas_products_alone_us", us(timings[3])},
                      {"speedup", ratio},
                      {"fused_tflops", flops / timings[0].median() / 1e6},
                      {"error_over_bound", verdict.worst},
                      {"wrong_elements", verdict.bad}});
    }
  }
  if (!json.empty()) {
    cudaDeviceProp properties{};
    require(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
    const nlohmann::ordered_json document = {
        {"bench", "gemm_ar_bench"},
        {"gpu", properties.name},
        {"devices", devices},
        {"ranks", "of one process, each with a stream and its share of its GPU's SMs"},
        {"inputs", "standard normal, fresh seed, bf16, B as [N,K]"},
        {"baseline",
         "cublasGemmEx per rank on its whole GPU, then an all-reduce kernel on each whole GPU "
         "(peer loads and stores, every byte once); same run, by turns"},
        {"check", "every element against float64, all ranks bitwise equal"},
        {"rows", rows}};
    std::ofstream file(json);
    file << document.dump(1) << "\n";
    if (!file) return 1;
  }
  return right ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) { return run(argc, argv); }
