/// \file
/// A whole GEMM+AllReduce job in one process: every rank is a thread with its own operator, over a
/// Cluster's memory.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cpu/gemm_ar_cpu.h"
#include "tests/kernels/support/cluster.h"

namespace mk::kernels::testing {

/// A NaN in bf16 and in f16: what outputs hold before a launch.
inline constexpr std::uint16_t kPoison = 0x7fff;

struct JobOptions {
  std::uint32_t nodes = 1;
  std::uint32_t locals = 1;
  Shape max;  ///< k: of rank 0; the other ranks' differ by their rank modulo 3
  DType dtype = DType::kBf16;
  GemmArTiling tiling;
  GemmArCpuOptions cpu;
  std::uint32_t slot_count_log2 = 5;
  std::uint64_t seed = 1;
};

/// One launch of one rank: inputs are drawn from the job's seed, the launch's number and the rank,
/// so that whoever needs them draws them again.
struct Inputs {
  std::uint32_t k = 0;
  std::uint64_t lda = 0;
  std::uint64_t ldb = 0;
  std::vector<std::uint16_t> a;
  std::vector<std::uint16_t> b;
};

/// One launch, the same for all ranks.
struct LaunchPlan {
  std::uint32_t m = 0;
  Mode mode = Mode::kFused;
  bool into_c = true;        ///< else only output() is looked at
  bool padded = false;       ///< leading dimensions larger than needed
  std::uint64_t inputs = 0;  ///< launches with equal numbers here have equal inputs
};

/// What a rank got: C, m rows of n.
struct RankResult {
  Result<LaunchStats> stats = LaunchStats{};
  std::vector<std::uint16_t> c;
};

class GemmArJob {
 public:
  /// Makes plan, memory and operators; the test fails if it cannot.
  explicit GemmArJob(const JobOptions& options);

  Cluster& cluster() { return *cluster_; }
  const GemmArPlan& plan() const { return plan_; }
  GemmArCpu& op(std::uint32_t rank) { return *ops_[rank]; }
  std::uint32_t size() const { return cluster_->size(); }
  const JobOptions& options() const { return options_; }

  /// All ranks run all launches, each at its own pace, with random pauses of at most `pause_max`
  /// before a launch. Answers [launch][rank]; a rank stops at its first failure.
  std::vector<std::vector<RankResult>> run(
      const std::vector<LaunchPlan>& launches,
      std::chrono::microseconds pause_max = std::chrono::microseconds(0));

  /// One rank, one launch, on the calling thread, outputs poisoned before.
  RankResult launch(std::uint32_t rank, const LaunchPlan& launch);

  Inputs inputs(std::uint32_t rank, const LaunchPlan& launch) const;

  /// Empty, or what is wrong: an element out of its bound, or two ranks with different bits.
  std::string check(const LaunchPlan& launch, const std::vector<RankResult>& results);
  /// The largest error over its bound so far.
  double worst() const { return worst_; }

 private:
  JobOptions options_;
  GemmArPlan plan_;
  std::unique_ptr<Cluster> cluster_;
  std::vector<std::unique_ptr<GemmArCpu>> ops_;
  double worst_ = 0;
};

}  // namespace mk::kernels::testing
