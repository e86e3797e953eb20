/// \file
/// A whole job of a product summed over ranks (GEMM+AllReduce, GEMM+ReduceScatter) in one process:
/// every rank is a thread with its own operator, over a Cluster's memory.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/comm/shard.h"
#include "kernels/ops/gemm_ar/cpu.h"
#include "kernels/ops/gemm_ar/schedule.h"
#include "kernels/ops/gemm_rs/cpu.h"
#include "kernels/ops/gemm_rs/schedule.h"
#include "tests/kernels/support/cluster.h"
#include "tests/kernels/support/two_shot_plan.h"

namespace mk::kernels::testing {

/// A NaN in bf16 and in f16: what outputs hold before a launch.
inline constexpr std::uint16_t kPoison = 0x7fff;

/// The operators. `rows`: of C, what a rank gets in a launch with m; `output`: where else than in
/// the caller's C it finds them, or null.
struct GemmArOp {
  using Plan = GemmArPlan;
  static constexpr std::uint32_t kNodesLeast = 1;
  using Cpu = GemmArCpu;
  static ShardRange rows(const World&, std::uint32_t m) { return {0, m}; }
  static std::uint64_t network_bytes(const Plan& plan, const World& world, std::uint32_t m) {
    return GemmArSchedule(plan, m).network_bytes(world.node, world.local);
  }
  static std::uint16_t* output(const Plan& plan, std::byte* workspace) {
    return reinterpret_cast<std::uint16_t*>(workspace + plan.layout.out);
  }
};
struct GemmArTwoShotOp : GemmArOp {
  using Plan = TwoShotPlan;
  static constexpr std::uint32_t kNodesLeast = TwoShotPlan::kNodesLeast;
};
struct GemmRsOp {
  using Plan = GemmRsPlan;
  static constexpr std::uint32_t kNodesLeast = 1;
  using Cpu = GemmRsCpu;
  static ShardRange rows(const World& world, std::uint32_t m) {
    return shard_of(m, world.size(), world.rank());
  }
  static std::uint64_t network_bytes(const Plan& plan, const World& world, std::uint32_t m) {
    return GemmRsSchedule(plan, m).network_bytes(world.node, world.local);
  }
  static std::uint16_t* output(const Plan&, std::byte*) { return nullptr; }
};

struct JobOptions {
  std::uint32_t nodes = 1;
  std::uint32_t locals = 1;
  Shape max;  ///< k: of rank 0; the other ranks' differ by their rank modulo 3
  DType dtype = DType::kBf16;
  GemmResult result;
  Tiling tiling;
  GemmCpuOptions cpu;
  std::uint32_t slot_count_log2 = 5;
  std::uint64_t seed = 1;
};

/// One launch of one rank: inputs are drawn from the job's seed, the launch's number and the rank,
/// so that each user draws them again.
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
  bool into_c = true;        ///< else, where the operator has one, only output() is looked at
  bool padded = false;       ///< leading dimensions larger than needed
  std::uint64_t inputs = 0;  ///< launches with equal numbers here have equal inputs
  bool mixed_modes = false;  ///< odd ranks run the other mode

  Mode mode_of(std::uint32_t rank) const {
    if (!mixed_modes || rank % 2 == 0) return mode;
    return mode == Mode::kFused ? Mode::kUnfused : Mode::kFused;
  }
};

/// What a rank got: its rows of C, result_columns() elements each.
struct RankResult {
  Result<LaunchStats> stats = LaunchStats{};
  std::vector<std::uint16_t> c;
};

template <class Op>
class GemmSumJob {
 public:
  /// Makes plan, memory and operators; the test fails if it cannot.
  explicit GemmSumJob(const JobOptions& options);

  Cluster& cluster() { return *cluster_; }
  const typename Op::Plan& plan() const { return plan_; }
  typename Op::Cpu& op(std::uint32_t rank) { return *ops_[rank]; }
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
  /// Of the launch, on all ranks; empty if the operator has none.
  std::vector<std::uint16_t> bias(const LaunchPlan& launch) const;

  /// Empty, or what is wrong: an element out of its bound, or two ranks with different bits of the
  /// same rows.
  std::string check(const LaunchPlan& launch, const std::vector<RankResult>& results);
  /// The largest error over its bound so far.
  double worst() const { return worst_; }

 private:
  JobOptions options_;
  typename Op::Plan plan_;
  std::unique_ptr<Cluster> cluster_;
  std::vector<std::unique_ptr<typename Op::Cpu>> ops_;
  double worst_ = 0;
};

extern template class GemmSumJob<GemmArOp>;
extern template class GemmSumJob<GemmArTwoShotOp>;
extern template class GemmSumJob<GemmRsOp>;

}  // namespace mk::kernels::testing
