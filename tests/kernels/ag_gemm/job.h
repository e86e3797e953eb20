/// \file
/// A whole AllGather+GEMM job in one process: every rank is a thread with its own operator, over a
/// Cluster's memory.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/ops/ag_gemm/cpu.h"
#include "tests/kernels/support/cluster.h"

namespace mk::kernels::testing {

struct AgGemmJobOptions {
  std::uint32_t nodes = 1;
  std::uint32_t locals = 1;
  Shape max;  ///< n: of rank 0; the other ranks' differ by 5 (gated: 6) times their rank modulo 3
  DType dtype = DType::kBf16;
  Epilogue epilogue;
  Tiling tiling;
  GemmCpuOptions cpu;
  std::uint32_t slot_count_log2 = 5;
  std::uint64_t seed = 1;
};

/// One launch, the same for all ranks.
struct AgGemmLaunchPlan {
  std::uint32_t m = 0;
  Mode mode = Mode::kFused;
  bool gathered = false;     ///< also ask for the whole A
  bool padded = false;       ///< leading dimensions larger than needed
  std::uint64_t inputs = 0;  ///< launches with equal numbers here have equal inputs
  /// Shards lie at AgGemmCpu::input(), rank by rank: every other one. (Not if padded.)
  bool in_place = false;
};

/// What a rank got: C, m rows of its n; and A, if asked for.
struct AgGemmResult {
  Result<LaunchStats> stats = LaunchStats{};
  std::vector<std::uint16_t> c;
  std::vector<std::uint16_t> gathered;
};

class AgGemmJob {
 public:
  /// Makes plans, memory and operators; throws if it cannot.
  explicit AgGemmJob(const AgGemmJobOptions& options);

  Cluster& cluster() { return *cluster_; }
  AgGemmCpu& op(std::uint32_t rank) { return *ops_[rank]; }
  std::uint32_t size() const { return cluster_->size(); }
  const AgGemmJobOptions& options() const { return options_; }

  /// All ranks run all launches, each at its own pace, with random pauses of at most `pause_max`
  /// before a launch. Answers [launch][rank]; a rank stops at its first failure.
  std::vector<std::vector<AgGemmResult>> run(
      const std::vector<AgGemmLaunchPlan>& launches,
      std::chrono::microseconds pause_max = std::chrono::microseconds(0));

  /// One rank, one launch, on the calling thread, outputs poisoned before.
  AgGemmResult launch(std::uint32_t rank, const AgGemmLaunchPlan& launch);

  /// Empty, or what is wrong: an element out of its bound, or a gathered A that is not A.
  std::string check(const AgGemmLaunchPlan& launch, const std::vector<AgGemmResult>& results);
  /// The largest error over its bound so far.
  double worst() const { return worst_; }

 private:
  std::vector<std::uint16_t> a_shard(std::uint32_t rank, const AgGemmLaunchPlan& launch,
                                     std::uint64_t lda) const;
  std::vector<std::uint16_t> b(std::uint32_t rank, const AgGemmLaunchPlan& launch,
                               std::uint64_t ldb) const;
  std::vector<std::uint16_t> bias(std::uint32_t rank, const AgGemmLaunchPlan& launch) const;
  std::uint32_t n_of(std::uint32_t rank) const {
    return options_.max.n + rank % 3 * (options_.epilogue.gated() ? 6 : 5);
  }

  AgGemmJobOptions options_;
  std::unique_ptr<Cluster> cluster_;
  std::vector<std::unique_ptr<AgGemmCpu>> ops_;
  double worst_ = 0;
};

}  // namespace mk::kernels::testing
