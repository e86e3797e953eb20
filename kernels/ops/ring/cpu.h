/// \file
/// Ring Attention on the CPU: O = softmax(scale Q K^T) V over a sequence that is spread over all
/// ranks. Each rank brings its rows of Q, K and V and gets its rows of O. Blocks are threads; what
/// they do is kernels/ops/ring/roles.h.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/comm/launch_stats.h"
#include "kernels/comm/rank_context.h"
#include "kernels/comm/types.h"
#include "kernels/cpu/launch_runner.h"
#include "kernels/ops/ring/spec.h"
#include "kernels/ops/ring/tensors.h"
#include "shm/host/result.h"

namespace mk::kernels {

/// One rank's operator. How to make one: see GemmArCpu; the plan is RingAttentionPlan::make.
///
/// Not thread-safe: one launch at a time, and one launch at a time over all operators that share
/// the context's lanes.
class RingAttentionCpu {
 public:
  /// Starts the blocks (threads that sleep between launches). Everything `context` points to
  /// outlives the operator. Errors: kInvalidArgument for a context that does not fit the plan,
  /// kSystem when threads cannot be started.
  static Result<std::unique_ptr<RingAttentionCpu>> create(const RingAttentionPlan& plan,
                                                          const RankContext& context,
                                                          const CpuOptions& options);
  ~RingAttentionCpu();
  RingAttentionCpu(const RingAttentionCpu&) = delete;
  RingAttentionCpu& operator=(const RingAttentionCpu&) = delete;

  /// Runs one launch over a sequence of `seq` rows in all; returns when this rank has its output
  /// and no block touches memory of the caller any more. All ranks launch equally often and with
  /// the same `seq` (plan().parts() ≤ seq ≤ the plan's). Of a plan with sequences_max `seq` is the
  /// number of rows in all, and `tensors` says how they divide, alike on all ranks.
  ///
  /// Of the tensors, the heads of a row follow each other, and so do those of `lse`
  /// (kInvalidArgument else).
  ///
  /// `mode` kAuto: as the estimate says (CpuOptions::rates); the statistics say which ran.
  ///
  /// A wrong argument (kInvalidArgument) changes nothing. Any other error breaks the operator for
  /// good: later launches answer the same error at once. With kTimeout a wait's deadline passed.
  /// With kAborted an abort word was set, or a local rank's launch failed. With kShapeMismatch
  /// ranks launched with different `seq`.
  Result<LaunchStats> launch(const RingAttentionTensors& tensors, std::uint64_t seq,
                             Mode mode = Mode::kFused);

  /// Rows of Q, K, V and O that this rank has of a sequence of `seq` rows. (A packed launch has the
  /// sum of that over its sequences.)
  std::uint32_t rows(std::uint64_t seq) const;

  const RingAttentionPlan& plan() const;
  /// Launches so far: the epoch of the last one.
  std::uint32_t epoch() const;
  /// For traces.
  LaunchRunner& runner();

 private:
  class Impl;
  explicit RingAttentionCpu(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace mk::kernels
