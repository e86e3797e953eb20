/// \file
/// The operators on GPUs in a world: how a launch is made, checked and judged. Shared by the files
/// of operators_gpu_test, whose worlds operators_test.cc names.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "tests/gpu/on_gpus.h"
#include "tests/gpu/operator_ranks.h"

namespace mk::test {

/// A rank with so long a product is late with every tile: who does not wait reads the last
/// launch's.
inline constexpr std::uint32_t kLongK = 8192;

struct World : GpuWorld {
  Op op;
};

class Operators : public OnGpus<World> {
 protected:
  static bool sums() { return GetParam().op != Op::kAgGemm; }

  /// AG+GEMM: how rows are shared within a node, and passed on there.
  struct Way {
    std::optional<bool> dma;
    std::uint32_t local_banks = 0, banks = 0;
  };
  /// By groups, with banks of any kind (of itself the operator chooses those where ranks share a
  /// GPU); by DMA engines where a node's ranks have a GPU each, which also pass on where there is
  /// one bank.
  static std::vector<Way> ways() {
    if (sums() || GetParam().locals == 1) return {{}};
    std::optional<bool> groups;
    if (world() <= static_cast<std::uint32_t>(GetParam().devices)) groups = false;
    std::vector<Way> all = {{groups, 0, 0}, {groups, 1, 0}};
    if (GetParam().nodes > 1) all.push_back({groups, 1, 1});
    if (GetParam().locals > static_cast<std::uint32_t>(GetParam().devices)) return all;
    all.push_back({true, 1, 0});
    if (GetParam().nodes > 1) all.push_back({true, 1, 1});
    return all;
  }
  static void take(const Way& way, JobSetup& setup) {
    if (sums() || setup.locals == 1) return;
    setup.options.dma = way.dma;
    setup.local_banks = way.local_banks;
    setup.banks = way.banks;
  }
  /// `test(setup)`, each way.
  template <class Test>
  static void each_way(JobSetup setup, Test&& test) {
    for (const Way& way : ways()) {
      SCOPED_TRACE(testing::Message() << (way.dma == true ? "DMA engines, " : "groups, ")
                                      << way.local_banks << " and " << way.banks << " banks");
      take(way, setup);
      test(setup);
      if (HasFatalFailure()) return;
    }
  }

  JobSetup setup(std::uint32_t m, std::uint32_t n, std::uint32_t k) {
    auto setup = placed<JobSetup>();
    setup.op = GetParam().op;
    setup.m = m;
    setup.n = n;
    setup.k.assign(world(), k);
    setup.options.wait_timeout = std::chrono::seconds(5);
    const std::vector<Way> all = ways();
    take(all[random_() % all.size()], setup);
    setup.options.dma_bytes = 1 << (15 + random_() % 8);
    // AG+GEMM of few rows: tiles of either kind.
    setup.options.spans = random_() % 2 == 0;
    setup.options.sums_once = random_() % 2 == 0;  // GEMM+RS over nodes: both ways to sum a shard
    // Tiles that are summed: at a pace of any kind, also where the operator would choose none.
    setup.options.piece_ns = static_cast<std::uint32_t>(random_() % 4) * 1500;
    // GEMM+AR over three nodes and more: both ways to exchange the nodes' sums.
    if (GetParam().op == Op::kGemmAr && GetParam().nodes > 2 && random_() % 2 == 0)
      setup.tiling.exchange = kernels::Exchange::kTwoShot;
    setup.in_workspace = random_() % 2 == 0;
    setup.gap = static_cast<std::uint32_t>(random_() % 3) * 24;  // between rows
    return setup;
  }
  std::uint64_t seed() { return random_() >> 16; }

  /// One launch with fresh inputs, checked.
  void check(Job& job, std::uint32_t m, kernels::Mode mode) {
    SCOPED_TRACE("m " + std::to_string(m) + ", " + name_of(mode));
    job.launch_all(m, seed(), mode);
    // All of them: the first to tell of a failure is seldom the one to blame.
    std::string failures;
    for (std::uint32_t r = 0; r < job.world(); ++r) {
      if (const Status finished = job.finish(r); !finished)
        failures += "\n" + finished.error().message;
    }
    if (!failures.empty() && job.proxy() != nullptr) failures += "\n" + job.proxy()->slowest_copy();
    ASSERT_EQ(failures, "");
    judge(job, m);
  }
  void judge(Job& job, std::uint32_t m) {
    const Verdict verdict = job.judge_all(m);
    worst_ = std::max(worst_, verdict.worst);
    ASSERT_TRUE(verdict.right()) << verdict.bad << " elements wrong, first " << verdict.first_bad;
  }
  /// One launch, not judged.
  void launch_to_end(Job& job, std::uint32_t m, std::uint64_t inputs, kernels::Mode mode) {
    job.launch_all(m, inputs, mode);
    finish_all(job);
    job.make_current(0);
  }
  /// The same, and its results: each rank's.
  void launch_and_keep(Job& job, std::uint32_t m, std::uint64_t inputs, kernels::Mode mode,
                       std::vector<DeviceMemory>& results) {
    launch_to_end(job, m, inputs, mode);
    for (std::uint32_t r = 0; r < job.world(); ++r) {
      const auto bytes = static_cast<std::size_t>(job.c_elements(r, m)) * kernels::kElementBytes;
      results.emplace_back(bytes);
      require(cudaMemcpy(results.back().data(), job.c(r), bytes, cudaMemcpyDefault), "copy");
    }
  }
  /// Whether the last launch's results have the bits of those.
  void expect_same_bits(Job& job, std::uint32_t m, const std::vector<DeviceMemory>& results) {
    for (std::uint32_t r = 0; r < job.world(); ++r) {
      ASSERT_EQ(count_different(results[r].data(), job.c(r), job.c_elements(r, m), job.stream(0)),
                0)
          << "rank " << r;
    }
  }
  /// Rounds of launches of 1 to `with.m` rows, or of one of these `heights`, one after the other on
  /// the streams; each round has fresh inputs and poisoned outputs, and is judged after its last
  /// launch.
  void launch_without_a_pause(const JobSetup& with, int rounds, int launches,
                              const std::vector<std::uint32_t>& heights = {}) {
    Job job(with);
    for (int round = 0; round < rounds && !HasFatalFailure(); ++round) {
      const std::uint64_t inputs = seed();
      for (std::uint32_t r = 0; r < job.world(); ++r) {
        job.fill(r, inputs);
        job.poison(r);
        require(cudaStreamSynchronize(job.stream(r)), "inputs");
      }
      std::uint32_t m = 0;
      for (int i = 0; i < launches; ++i) {
        m = heights.empty() ? static_cast<std::uint32_t>(1 + random_() % with.m)
                            : heights[random_() % heights.size()];
        for (std::uint32_t r = 0; r < job.world(); ++r) {
          job.make_current(r);
          const Status launched = job.launch(r, m);
          ASSERT_TRUE(launched) << launched.error().message;
        }
      }
      finish_all(job);
      if (!HasFatalFailure()) judge(job, m);
    }
  }
};

}  // namespace mk::test
