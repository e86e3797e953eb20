/// \file
/// gemm_bench: our matrix product against cuBLAS, same run, same inputs, every element checked.
///
///     gemm_bench [--check] [--speed] [--sweep] [--few-rows] [--policies] [--seconds S] [--json
///     FILE]
///
/// --check: odd shapes, both layouts of B, both types, every variant. --speed: the shapes of the
/// table, ours and cuBLAS interleaved, medians. --sweep: speed of each variant and band, to set the
/// defaults.
/// --few-rows: the same of products of 64 to 1024 rows, with K shared by several blocks, too.
/// --policies: what a gate and a store of an operator's kind cost. Exit status 1 if any element of
/// any product is wrong.
#include <cublas_v2.h>
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/gpu/products.h"
#include "tests/gpu/race.h"
#include "tests/gpu/seam_run.h"

namespace {

using mk::kernels::cuda::BLayout;
using mk::kernels::cuda::DType;
using mk::kernels::cuda::GemmPlan;
using mk::kernels::cuda::GemmProblem;
using mk::kernels::cuda::GemmVariant;
using mk::test::DeviceMemory;
using mk::test::kVariants;
using mk::test::Launch;
using mk::test::launch_or_exit;
using mk::test::name;
using mk::test::plans_for;
using mk::test::race;
using mk::test::RaceTiming;
using mk::test::require;
using mk::test::SeamRun;
using mk::test::Sets;
using mk::test::Shape;

constexpr std::array kSpeedShapes = {Shape{2048, 2048, 2048},  Shape{4096, 4096, 4096},
                                     Shape{8192, 8192, 8192},  Shape{16384, 8192, 4096},
                                     Shape{32768, 4096, 4096}, Shape{8192, 4096, 14336},
                                     Shape{16384, 16384, 2048}};
constexpr std::array kSmallShapes = {
    Shape{16, 8192, 8192},  Shape{64, 8192, 8192},   Shape{128, 8192, 8192}, Shape{256, 8192, 8192},
    Shape{512, 4096, 4096}, Shape{1024, 4096, 4096}, Shape{1024, 7168, 8192}};

constexpr std::array kFewRows = {64, 128, 256, 512, 1024};
constexpr std::array kFewRowsWeights = {Shape{0, 8192, 7168}, Shape{0, 14336, 8192},
                                        Shape{0, 2560, 8192}};

struct Options {
  bool few_rows = false;
  bool check = false;
  bool speed = false;
  bool sweep = false;
  bool policies = false;
  double seconds = 0.25;  // measured per shape and side
  std::string json;
};

/// The vendor's library, in its default mode.
class Cublas {
 public:
  Cublas() {
    check(cublasCreate(&handle_), "cublasCreate");
    constexpr std::size_t kWorkspaceBytes =
        64u << 20;  // more than the 32 MiB cuBLAS recommends on Hopper
    workspace_.emplace_back(kWorkspaceBytes);
    check(cublasSetWorkspace(handle_, workspace_[0].data(), kWorkspaceBytes), "cublasSetWorkspace");
  }
  ~Cublas() { cublasDestroy(handle_); }
  Cublas(const Cublas&) = delete;
  Cublas& operator=(const Cublas&) = delete;

  int version() const {
    int version = 0;
    check(cublasGetVersion(handle_, &version), "cublasGetVersion");
    return version;
  }

  /// cuBLAS is column-major: it computes C^T = B^T A^T.
  void run(const GemmProblem& p) const {
    const float one = 1, zero = 0;
    const bool nk = p.b_layout == BLayout::kNK;
    const cudaDataType_t type = p.dtype == DType::kBf16 ? CUDA_R_16BF : CUDA_R_16F;
    check(cublasGemmEx(handle_, nk ? CUBLAS_OP_T : CUBLAS_OP_N, CUBLAS_OP_N, p.n, p.m, p.k, &one,
                       p.b, type, nk ? p.k : p.n, p.a, type, p.k, &zero, p.c, type, p.n,
                       CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
          "cublasGemmEx");
  }

 private:
  static void check(cublasStatus_t status, const char* what) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    fmt::print(stderr, "{}: {}\n", what, cublasGetStatusString(status));
    std::exit(1);
  }
  cublasHandle_t handle_ = nullptr;
  std::vector<DeviceMemory> workspace_;
};

struct Row {
  Shape shape;
  DType dtype;
  BLayout layout;
  std::string variant;
  RaceTiming ours, theirs;              // interleaved
  RaceTiming ours_alone, theirs_alone;  // each long enough to settle at its own clock; may be empty
  mk::test::Verdict verdict;
  double flops() const { return 2.0 * shape.m * shape.n * shape.k; }
  double tflops(const RaceTiming& t) const { return flops() / t.median() / 1e6; }
  double ratio() const { return theirs.median() / ours.median(); }
  bool alone() const { return !ours_alone.us.empty(); }
  double ratio_alone() const { return theirs_alone.median() / ours_alone.median(); }
};

Row measure(const Cublas& cublas, Shape shape, DType dtype, BLayout layout, double seconds,
            bool alone) {
  Row row{shape, dtype, layout, "", {}, {}, {}, {}, {}};
  Sets sets(shape, dtype, layout);
  const auto plans = plans_for(sets, {});
  row.variant = mk::kernels::cuda::gemm_variant_name(plans[0].variant());
  const std::vector<Launch> sides = {
      [&](int set) { launch_or_exit(plans[static_cast<std::size_t>(set)]); },
      [&](int set) { cublas.run(sets.problems()[static_cast<std::size_t>(set)]); }};
  auto timings = race(sides, sets.count(), row.flops(), seconds);
  row.ours = timings[0];
  row.theirs = timings[1];
  if (alone) {
    constexpr int kRounds = 3;
    auto endured = mk::test::endure(sides, sets.count(), row.flops(), seconds, kRounds);
    row.ours_alone = endured[0];
    row.theirs_alone = endured[1];
  }
  sets.poison_outputs();
  for (std::size_t i = 0; i < plans.size(); ++i) sides[0](static_cast<int>(i));
  row.verdict = mk::test::judge(sets.problems()[0], 0, shape.m, nullptr);
  for (std::size_t i = 1; i < plans.size() && row.flops() < 1e11; ++i) {
    const auto other = mk::test::judge(sets.problems()[i], 0, shape.m, nullptr);
    row.verdict.worst = std::max(row.verdict.worst, other.worst);
    row.verdict.error_max = std::max(row.verdict.error_max, other.error_max);
    row.verdict.bad += other.bad;
  }
  return row;
}

std::string read_command(const char* command) {
  std::string text;
  if (FILE* pipe = popen(command, "r")) {
    char line[256];
    while (std::fgets(line, sizeof line, pipe) != nullptr) text += line;
    pclose(pipe);
  }
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

void write_json(const std::string& path, const std::string& command, const std::vector<Row>& rows,
                int cublas_version, const mk::test::OddShapes& odd) {
  using Json = nlohmann::ordered_json;
  const auto rounded = [](double value) { return std::round(value * 1e4) / 1e4; };
  const auto times = [&](const RaceTiming& t) {
    return Json{{"median", rounded(t.median())},
                {"min", rounded(t.min())},
                {"max", rounded(t.max())},
                {"samples", t.us.size()}};
  };
  cudaDeviceProp properties{};
  require(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  int runtime = 0;
  cudaRuntimeGetVersion(&runtime);
  Json json = {
      {"bench", "gemm_bench"},
      {"command", command},
      {"date", read_command("date -u +%FT%TZ")},
      {"gpu", properties.name},
      {"sms", properties.multiProcessorCount},
      {"driver", read_command("nvidia-smi --query-gpu=driver_version --format=csv,noheader")},
      {"cuda_runtime", runtime},
      {"cublas", cublas_version},
      {"inputs", "standard normal, fresh seed, input sets rotated past L2"},
      {"baseline", "cublasGemmEx, same run, by turns, back-to-back launches"},
      {"check", "every element against float64, bound in tests/gpu/gemm_reference.h"},
      {"odd_shapes", {{"checked", odd.checked}, {"wrong", odd.wrong}}},
      {"rows", Json::array()}};
  for (const Row& r : rows) {
    json["rows"].push_back({{"m", r.shape.m},
                            {"n", r.shape.n},
                            {"k", r.shape.k},
                            {"type", name(r.dtype)},
                            {"b", name(r.layout)},
                            {"variant", r.variant},
                            {"us", times(r.ours)},
                            {"cublas_us", times(r.theirs)},
                            {"tflops", rounded(r.tflops(r.ours))},
                            {"cublas_tflops", rounded(r.tflops(r.theirs))},
                            {"ratio", rounded(r.ratio())},
                            {"error_max", r.verdict.error_max},
                            {"error_over_bound", rounded(r.verdict.worst)},
                            {"wrong_elements", r.verdict.bad}});
    if (r.alone()) {
      json["rows"].back()["alone"] = {{"tflops", rounded(r.tflops(r.ours_alone))},
                                      {"cublas_tflops", rounded(r.tflops(r.theirs_alone))},
                                      {"ratio", rounded(r.ratio_alone())}};
    }
  }
  std::ofstream file(path);
  file << json.dump(1) << "\n";
  if (!file) {
    fmt::print(stderr, "cannot write {}\n", path);
    std::exit(1);
  }
}

/// What the policies cost: plain, with slots here, and with slots on a second GPU if there is one.
void race_seams(const Cublas& cublas, double seconds, bool peer) {
  if (peer) require(cudaDeviceEnablePeerAccess(1, 0), "peer access");
  for (const Shape& shape : {kSpeedShapes[2], kSpeedShapes[3], kSpeedShapes[6]}) {
    Sets sets(shape, DType::kBf16, BLayout::kNK);
    const GemmProblem& p = sets.problems()[0];
    const auto plans = plans_for(sets, {GemmVariant::k128x256Pair});
    const int blocks = plans[0].blocks();
    const int other = peer ? 1 : 0;
    const SeamRun here(p, 0, false), here_staged(p, 0, true);
    const SeamRun there(p, other, false), there_staged(p, other, true);
    std::vector<Launch> sides = {
        [&](int) { cublas.run(p); }, [&](int) { launch_or_exit(plans[0]); },
        [&](int) { here.launch(blocks); }, [&](int) { here_staged.launch(blocks); }};
    if (peer) {
      sides.emplace_back([&](int) { there.launch(blocks); });
      sides.emplace_back([&](int) { there_staged.launch(blocks); });
    }
    constexpr std::array kNames = {"cublas",          "plain",           "slots",
                                   "slots, 3 stages", "slots on a peer", "the same, 3 stages"};
    const double flops = 2.0 * shape.m * shape.n * shape.k;
    const auto timings = race(sides, 1, flops, seconds);
    fmt::print("{:5} {:5} {:5} TFLOPS:", shape.m, shape.n, shape.k);
    for (std::size_t i = 0; i < timings.size(); ++i) {
      fmt::print(" {} {:.1f};", kNames[i], flops / timings[i].median() / 1e6);
    }
    fmt::print("\n");
  }
}

void sweep(const Cublas& cublas, double seconds) {
  for (BLayout layout : {BLayout::kNK, BLayout::kKN}) {
    std::vector<Shape> shapes(kSpeedShapes.begin(), kSpeedShapes.end());
    if (layout == BLayout::kNK)
      shapes.insert(shapes.end(), kSmallShapes.begin(), kSmallShapes.end());
    for (const Shape& shape : shapes) {
      Sets sets(shape, DType::kBf16, layout);
      std::vector<std::vector<GemmPlan>> all;
      std::vector<std::string> names;
      for (GemmVariant variant : kVariants) {
        for (int band : {1024, 2048, 4096}) {
          const bool large_tile = variant >= GemmVariant::k128x256;
          if (band != 2048 && (!large_tile || shape.m <= 2048)) continue;
          all.push_back(plans_for(sets, {variant, 0, band}));
          names.push_back(
              fmt::format("{}/{}", mk::kernels::cuda::gemm_variant_name(variant), band));
        }
      }
      std::vector<Launch> sides;
      for (const auto& plans : all) {
        sides.emplace_back(
            [&plans](int set) { launch_or_exit(plans[static_cast<std::size_t>(set)]); });
      }
      sides.emplace_back(
          [&](int set) { cublas.run(sets.problems()[static_cast<std::size_t>(set)]); });
      names.emplace_back("cublas");
      const double flops = 2.0 * shape.m * shape.n * shape.k;
      const auto timings = race(sides, sets.count(), flops, seconds);
      fmt::print("{} {:5} {:5} {:5}", name(layout), shape.m, shape.n, shape.k);
      for (std::size_t i = 0; i < timings.size(); ++i) {
        fmt::print("  {} {:.0f}", names[i], flops / timings[i].median() / 1e6);
      }
      fmt::print("\n");
      std::fflush(stdout);
    }
  }
}

/// Every variant and number of blocks that share K, beside what the plan takes and cuBLAS.
void sweep_few_rows(const Cublas& cublas, double seconds) {
  for (const Shape& weights : kFewRowsWeights) {
    for (const int rows : kFewRows) {
      const Shape shape{rows, weights.n, weights.k};
      Sets sets(shape, DType::kBf16, BLayout::kNK);
      std::vector<std::vector<GemmPlan>> all = {plans_for(sets, {})};
      const auto name_of = [](const GemmPlan& plan) {
        return fmt::format("{}/{}", mk::kernels::cuda::gemm_variant_name(plan.variant()),
                           plan.splits());
      };
      std::vector<std::string> names = {"auto " + name_of(all[0][0])};
      for (GemmVariant variant : kVariants) {
        const int most = mk::kernels::cuda::splits_max(variant, shape.k / 64);
        for (int splits = 1; splits <= most; ++splits) {
          auto plans = plans_for(sets, {variant, splits});
          // More than a wave of shares is never quicker.
          if (splits > 1 && plans[0].blocks() > 132) continue;
          all.push_back(std::move(plans));
          names.push_back(name_of(all.back()[0]));
        }
      }
      std::vector<Launch> sides;
      for (const auto& plans : all) {
        sides.emplace_back(
            [&plans](int set) { launch_or_exit(plans[static_cast<std::size_t>(set)]); });
      }
      sides.emplace_back(
          [&](int set) { cublas.run(sets.problems()[static_cast<std::size_t>(set)]); });
      const double flops = 2.0 * shape.m * shape.n * shape.k;
      const auto timings = race(sides, sets.count(), flops, seconds);
      const double theirs = timings.back().median();
      fmt::print("{:5} {:5} {:5} cublas {:.1f} us;", shape.m, shape.n, shape.k, theirs);
      for (std::size_t i = 0; i < all.size(); ++i) {
        sets.poison_outputs();
        launch_or_exit(all[i][0]);
        const bool right = mk::test::judge(sets.problems()[0], 0, shape.m, nullptr).right();
        const double ours = timings[i].median();
        fmt::print(" {} {:.1f} ({:.3f}){}", names[i], ours, theirs / ours, right ? "" : " WRONG");
      }
      fmt::print("\n");
      std::fflush(stdout);
    }
  }
}

std::string times(const RaceTiming& t) {
  return fmt::format("{:.1f} ({:.1f}..{:.1f})", t.median(), t.min(), t.max());
}

void print_rows(const std::vector<Row>& rows) {
  fmt::print(
      "     m      n      k type b  tile      us (min..max)              cublas us (min..max)  "
      "     TFLOPS cublas ratio | alone: TFLOPS cublas ratio | error/bound wrong\n");
  for (const Row& r : rows) {
    fmt::print("{:6} {:6} {:6} {:4} {} {:9} {:24} {:24} {:6.1f} {:6.1f} {:.3f} | ", r.shape.m,
               r.shape.n, r.shape.k, name(r.dtype), name(r.layout), r.variant, times(r.ours),
               times(r.theirs), r.tflops(r.ours), r.tflops(r.theirs), r.ratio());
    if (r.alone()) {
      fmt::print("{:6.1f} {:6.1f} {:.3f} | ", r.tflops(r.ours_alone), r.tflops(r.theirs_alone),
                 r.ratio_alone());
    }
    fmt::print("{:.3f} {}\n", r.verdict.worst, r.verdict.bad);
  }
}

void print_summary(const char* what, std::vector<double> ratios) {
  std::sort(ratios.begin(), ratios.end());
  const std::size_t half = ratios.size() / 2;
  fmt::print("bf16 NK, six large shapes, {}: median ratio {:.3f}, lowest {:.3f}\n", what,
             (ratios[half - 1] + ratios[half]) / 2, ratios.front());
}

int run(int argc, char** argv) {
  Options options;
  std::string command = "gemm_bench";
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    command += " " + argument;
    if (argument == "--check") {
      options.check = true;
    } else if (argument == "--speed") {
      options.speed = true;
    } else if (argument == "--sweep") {
      options.sweep = true;
    } else if (argument == "--few-rows") {
      options.few_rows = true;
    } else if (argument == "--policies") {
      options.policies = true;
    } else if (argument == "--seconds" && i + 1 < argc) {
      options.seconds = std::atof(argv[++i]);
      command += std::string(" ") + argv[i];
    } else if (argument == "--json" && i + 1 < argc) {
      options.json = argv[++i];
    } else {
      fmt::print(
          stderr,
          "usage: gemm_bench [--check] [--speed] [--sweep] [--few-rows] [--policies] [--seconds S] "
          "[--json FILE]\n");
      return 2;
    }
  }
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    fmt::print("gemm_bench: no CUDA device here, nothing measured\n");
    return 77;
  }
  mk::test::OddShapes odd;
  if (options.check) odd = mk::test::check_odd_shapes();
  int wrong = odd.wrong;
  std::fflush(stdout);
  Cublas cublas;
  if (options.sweep) sweep(cublas, options.seconds);
  if (options.few_rows) sweep_few_rows(cublas, options.seconds);
  if (options.policies) race_seams(cublas, options.seconds, devices > 1);
  std::vector<Row> rows;
  if (options.speed) {
    for (const Shape& shape : kSpeedShapes) {
      rows.push_back(measure(cublas, shape, DType::kBf16, BLayout::kNK, options.seconds, true));
    }
    for (const Shape& shape : kSpeedShapes) {
      rows.push_back(measure(cublas, shape, DType::kBf16, BLayout::kKN, options.seconds, false));
    }
    rows.push_back(measure(cublas, Shape{8192, 8192, 8192}, DType::kF16, BLayout::kNK,
                           options.seconds, false));
    for (const Shape& shape : kSmallShapes) {
      rows.push_back(measure(cublas, shape, DType::kBf16, BLayout::kNK, options.seconds, false));
    }
    print_rows(rows);
    std::vector<double> by_turns, alone;
    for (std::size_t i = 1; i < kSpeedShapes.size(); ++i) {
      by_turns.push_back(rows[i].ratio());
      alone.push_back(rows[i].ratio_alone());
    }
    print_summary("by turns", by_turns);
    print_summary("alone", alone);
    fmt::print("2048^3 by turns: {:.3f}\n", rows[0].ratio());
    for (const Row& row : rows) wrong += row.verdict.right() ? 0 : 1;
    if (!options.json.empty()) write_json(options.json, command, rows, cublas.version(), odd);
  }
  require(cudaDeviceSynchronize(), "end");
  fmt::print("{} products wrong\n", wrong);
  return wrong == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gemm_bench: %s\n", error.what());
    return 1;
  }
}
