#include "tests/bench/mkbench/calibrate.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <random>
#include <thread>
#include <vector>

#include "kernels/cpu/cpu_gemm.h"
#include "kernels/plan/model.h"
#include "tests/bench/mkbench/machine.h"

namespace mk::bench {
namespace {

namespace plan = kernels::plan;
using Clock = std::chrono::steady_clock;

/// One thread's, of tiles as operators have them.
Result<double> product_gflops(kernels::GemmPath path) {
  constexpr kernels::CpuGemm::TileShape kTile{128, 256};
  constexpr std::uint32_t kK = 1024;
  MK_ASSIGN_OR_RETURN(auto gemm, kernels::CpuGemm::create(1, kTile, kK, kernels::DType::kBf16,
                                                          kernels::BLayout::kNK, path));
  const std::uint64_t lda = kK;
  MK_RETURN_IF_ERROR(gemm->prepare({&kTile, 1}, {&lda, 1}, kK));
  std::mt19937 random(1);
  const auto drawn = [&](std::size_t count) {
    std::vector<std::uint16_t> elements(count);
    // Sign and low bits at random: values within +-1.
    for (auto& element : elements)
      element = static_cast<std::uint16_t>(0x3e80 + (random() & 0x80ff));
    return elements;
  };
  const auto a = drawn(std::size_t{kTile.rows} * kK);
  const auto b = drawn(std::size_t{kTile.columns} * kK);
  std::vector<float> c(std::size_t{kTile.rows} * kTile.columns);
  double best = 0;
  const auto end = Clock::now() + std::chrono::milliseconds(500);
  do {
    constexpr int kTiles = 16;
    const auto begin = Clock::now();
    for (int tile = 0; tile < kTiles; ++tile) {
      if (!gemm->multiply(0, kTile, a.data(), lda, b.data(), c.data()))
        return propagate(gemm->error());
    }
    const std::chrono::duration<double> elapsed = Clock::now() - begin;
    best = std::max(best, 2.0 * kTile.rows * kTile.columns * kK * kTiles / elapsed.count() / 1e9);
  } while (Clock::now() < end);
  return best;
}

}  // namespace

std::uint32_t cores_here() {
  cpu_set_t set;
  if (::sched_getaffinity(0, sizeof(set), &set) == 0)
    return static_cast<std::uint32_t>(std::max(1, CPU_COUNT(&set)));
  return std::max(1u, std::thread::hardware_concurrency());
}

Result<CpuMeasured> measure_cpu() {
  CpuMeasured measured;
  measured.cores = cores_here();
  MK_ASSIGN_OR_RETURN(measured.f32_gflops, product_gflops(kernels::GemmPath::kThroughF32));
  // Where oneDNN has no kernel of its own for the type, the way through fp32 is the only one.
  const auto native = product_gflops(kernels::GemmPath::kNative);
  measured.gflops = native ? *native : measured.f32_gflops;
  measured.memory_gb_s = 2 * copy_bytes_per_second() / 1e9;
  return measured;
}

plan::Machine calibrated(const plan::Machine& like, const CpuMeasured& measured) {
  plan::Machine machine = like;
  const auto take = [](double from, double& to) {
    if (from > 0) to = from;
  };
  if (measured.cores > 0) machine.sms = measured.cores;
  take(measured.gflops, machine.cpu_gflops);
  take(measured.f32_gflops, machine.cpu_f32_gflops);
  take(measured.memory_gb_s, machine.cpu_memory_gb_s);
  return machine;
}

plan::Machine calibrated(const plan::Machine& like, const GpuMeasured& measured) {
  plan::Machine machine = like;
  if (measured.sms > 0) machine.sms = measured.sms;
  constexpr double kM = 8192, kN = 8192, kK = 4096;
  const auto factor = [&](double us, std::uint32_t columns) {
    if (us <= 0) return 1.0;
    const kernels::Tiling tiling{128, columns};
    const double tile = plan::tile_us(like, tiling, kK / 64, 2 * kN * kK);
    return us / plan::product_us(like, kM / 128 * kN / columns, tile, machine.sms, columns);
  };
  const double of_256 = factor(measured.product_us_256, 256);
  machine.step_us_256 *= of_256;
  machine.tile_us_256 *= of_256;
  const double of_128 = factor(measured.product_us_128, 128);
  machine.step_us_128 *= of_128;
  machine.tile_us_128 *= of_128;
  const double of_64 = factor(measured.product_us_64, 64);
  machine.step_us_64 *= of_64;
  machine.step_us_64_rows *= of_64;
  if (measured.attention_us > 0) {
    constexpr double kFlops = 4.0 * 32 * 128 * 8192 * 8192;
    const double block = 2.0 * 128 * 256 * 64 / machine.step_us_256 * 1e6;
    machine.attention_share = kFlops / (measured.attention_us / 1e6) /
                              (block * machine.sms / (1 + machine.power_slowdown));
  }
  if (measured.memory_gb_s > 0) {
    const double times = measured.memory_gb_s / like.hbm_gb_s;
    machine.hbm_gb_s *= times;
    machine.weights_gb_s *= times;
    machine.weights_sm_gb_s *= times;
  }
  if (measured.peer_gb_s > 0) {
    const double times = measured.peer_gb_s / like.engine_gb_s;
    for (double plan::Machine::*rate :
         {&plan::Machine::link_gb_s, &plan::Machine::rows_link_gb_s, &plan::Machine::sums_link_gb_s,
          &plan::Machine::engine_gb_s}) {
      machine.*rate *= times;
    }
  }
  return machine;
}

}  // namespace mk::bench
