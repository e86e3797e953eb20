/// \file
/// AllGather+GEMM on the CPU: C_r[m,n_r] = A[m,k] B_r[k,n_r], where each rank brings its share of
/// A's rows and every rank r gets its whole C_r. Blocks are threads; what they do is
/// kernels/ops/ag_gemm/roles.h.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/comm/launch_stats.h"
#include "kernels/comm/rank_context.h"
#include "kernels/comm/types.h"
#include "kernels/cpu/launch_runner.h"
#include "kernels/ops/ag_gemm/spec.h"
#include "shm/host/result.h"

namespace mk::kernels {

/// One rank's operator. How to make one: see GemmArCpu; the plan is AgGemmPlan::make.
///
/// Not thread-safe: one launch at a time, and one launch at a time over all operators that share
/// the context's lanes.
class AgGemmCpu {
 public:
  /// Starts the blocks (threads that sleep between launches). Everything `context` points to
  /// outlives the operator. Errors: kInvalidArgument for a context that does not fit the plan,
  /// kUnsupported when oneDNN has no kernel for this machine, kSystem when threads cannot be
  /// started.
  static Result<std::unique_ptr<AgGemmCpu>> create(const AgGemmPlan& plan,
                                                   const RankContext& context,
                                                   const GemmCpuOptions& options);
  ~AgGemmCpu();
  AgGemmCpu(const AgGemmCpu&) = delete;
  AgGemmCpu& operator=(const AgGemmCpu&) = delete;

  /// Runs one launch; returns when this rank has all of C and no block touches memory of the caller
  /// any more. All ranks launch equally often and with the same `m` (1 ≤ m ≤ the plan's), the rows
  /// of the whole A.
  ///
  /// `a_shard`: this rank's rows of A, shard_of(m, world size, rank) (comm/shard.h) of k elements,
  /// `lda` ≥ k apart; may be null when they are none. `b`: per BLayout, `ldb` ≥ its contiguous
  /// side. `c`: m rows of the plan's
  /// result_columns() elements, `ldc` ≥ that apart. `bias`: n elements, or null, as the plan says.
  /// `gathered`: null, or room for the whole A, m rows of k elements without gaps. Leading
  /// dimensions are in elements. None of them may overlap another or lie in the workspace, but for
  /// a shard at `input()`. `c` and `gathered` are undefined after an error.
  ///
  /// `mode` kAuto: as the estimate says (CpuOptions::rates); the statistics say which ran.
  ///
  /// A wrong argument (kInvalidArgument) changes nothing. Any other error breaks the operator for
  /// good: later launches answer the same error at once. With kTimeout a wait's deadline passed.
  /// With kAborted an abort word was set, or a local rank's launch failed. With kShapeMismatch
  /// ranks launched with different `m`.
  Result<LaunchStats> launch(const void* a_shard, std::uint64_t lda, const void* b,
                             std::uint64_t ldb, void* c, std::uint64_t ldc, std::uint32_t m,
                             Mode mode = Mode::kFused, void* gathered = nullptr,
                             const void* bias = nullptr);

  /// See AgGemmPlan::input. A launch with a shard elsewhere may overwrite it.
  void* input() const;

  const AgGemmPlan& plan() const;
  /// Launches so far: the epoch of the last one.
  std::uint32_t epoch() const;
  /// For traces.
  LaunchRunner& runner();

 private:
  class Impl;
  explicit AgGemmCpu(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace mk::kernels
