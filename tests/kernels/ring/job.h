/// \file
/// A whole Ring Attention job in one process: every rank is a thread with its own operator, over a
/// Cluster's memory.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "client/tools/numeric/attention_reference.h"
#include "kernels/comm/shard.h"
#include "kernels/ops/ring/cpu.h"
#include "tests/kernels/support/cluster.h"

namespace mk::kernels::testing {

struct RingJobOptions {
  std::uint32_t nodes = 1;
  std::uint32_t locals = 1;
  RingAttentionShape shape;
  RingAttentionTiling tiling;
  CpuOptions cpu;
  std::uint32_t slot_count_log2 = 5;
  std::uint64_t seed = 1;
};

/// What the inputs are like.
enum class RingInputs : std::uint8_t {
  kRandom = 0,   ///< from [-1, 1)
  kSharp = 1,    ///< queries and keys from [-32, 32): few keys take all
  kEqual = 2,    ///< all keys the same: every score of a query is the same
  kDistant = 3,  ///< each key is all its position's, scores from hundreds below to hundreds above 0
  kOnes = 4,     ///< all 1
};

/// One launch, the same for all ranks.
struct RingLaunch {
  std::uint32_t seq = 0;
  /// Of a plan with sequences_max: the rows of each sequence, `seq` in all.
  std::vector<std::uint32_t> lengths = {};
  Mode mode = Mode::kFused;
  RingInputs inputs = RingInputs::kRandom;
  bool padded = false;     ///< rows further apart than they need be
  bool lse = true;         ///< wanted
  std::uint64_t draw = 0;  ///< launches with equal numbers here have equal inputs
  double scale = 0;
  /// Keys and values of this position and all after it are `special`.
  std::uint32_t special_from = ~0u;
  float special = 0;
};

/// What a rank got, its rows without gaps.
struct RingRankResult {
  Result<LaunchStats> stats = LaunchStats{};
  std::vector<std::uint16_t> out;
  std::vector<float> lse;
};

class RingJob {
 public:
  /// Makes plan, memory and operators; throws if it cannot.
  explicit RingJob(const RingJobOptions& options);

  Cluster& cluster() { return *cluster_; }
  const RingAttentionPlan& plan() const { return plan_; }
  RingAttentionCpu& op(std::uint32_t rank) { return *ops_[rank]; }
  std::uint32_t size() const { return cluster_->size(); }

  /// All ranks run all launches, each at its own pace, with random pauses of at most `pause_max`
  /// before a launch. Answers [launch][rank]; a rank stops at its first failure.
  std::vector<std::vector<RingRankResult>> run(
      const std::vector<RingLaunch>& launches,
      std::chrono::microseconds pause_max = std::chrono::microseconds(0));

  /// One rank, one launch, on the calling thread, outputs poisoned before.
  RingRankResult launch(std::uint32_t rank, const RingLaunch& launch);

  /// Empty, or what is wrong: an element out of its bound.
  std::string check(const RingLaunch& launch, const std::vector<RingRankResult>& results);
  /// The largest error over its bound so far: 1 would be just allowed.
  double worst() const { return worst_; }

 private:
  /// The whole sequence's rows of Q (0), K (1) or V (2), of `heads` heads.
  std::vector<std::uint16_t> tensor(const RingLaunch& launch, std::uint32_t which,
                                    std::uint32_t heads) const;
  /// A rank's rows of the whole.
  std::vector<std::uint16_t> rows_of(const std::vector<std::uint16_t>& whole, std::uint32_t rank,
                                     const RingLaunch& launch, std::uint32_t row,
                                     std::uint64_t stride) const;
  /// What the launch's one sequence, or each of its sequences, begins and ends with.
  static std::vector<ShardRange> sequences(const RingLaunch& launch);
  /// The rank's, of a sequence, counted from its first row.
  std::vector<ShardRange> parts(std::uint32_t rank, std::uint32_t rows) const;
  double scale(const RingLaunch& launch) const;
  DataType type() const {
    return options_.shape.dtype == DType::kBf16 ? DataType::kBf16 : DataType::kF16;
  }

  RingJobOptions options_;
  RingAttentionPlan plan_;
  std::unique_ptr<Cluster> cluster_;
  std::vector<std::unique_ptr<RingAttentionCpu>> ops_;
  double worst_ = 0;
};

}  // namespace mk::kernels::testing
