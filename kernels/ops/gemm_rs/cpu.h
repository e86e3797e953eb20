/// \file
/// GEMM+ReduceScatter on the CPU: C[m,n] = sum over all ranks r of A_r[m,k_r] B_r[k_r,n], and
/// rank r gets its shard of C's rows. Blocks are threads; what they do is
/// kernels/ops/gemm_rs/roles.h.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/comm/launch_stats.h"
#include "kernels/comm/rank_context.h"
#include "kernels/comm/types.h"
#include "kernels/cpu/launch_runner.h"
#include "kernels/ops/gemm_rs/spec.h"
#include "shm/host/result.h"

namespace mk::kernels {

/// One rank's operator. How to make one: see GemmArCpu; the plan is GemmRsPlan::make.
///
/// Not thread-safe: one launch at a time, and one launch at a time over all operators that share
/// the context's lanes.
class GemmRsCpu {
 public:
  /// Starts the blocks (threads that sleep between launches). `k` is this rank's own, any ≥ 1.
  /// Everything `context` points to outlives the operator. Errors: kInvalidArgument for a context
  /// that does not fit the plan, kUnsupported when oneDNN has no kernel for this machine, kSystem
  /// when threads cannot be started.
  static Result<std::unique_ptr<GemmRsCpu>> create(const GemmRsPlan& plan, std::uint32_t k,
                                                   const RankContext& context,
                                                   const GemmCpuOptions& options);
  ~GemmRsCpu();
  GemmRsCpu(const GemmRsCpu&) = delete;
  GemmRsCpu& operator=(const GemmRsCpu&) = delete;

  /// Runs one launch; returns when this rank has its rows of C, has done its part for the others',
  /// and no block touches memory of the caller any more. All ranks launch equally often and with
  /// the same `m` (1 ≤ m ≤ the plan's).
  ///
  /// `a`: m rows of k elements, `lda` ≥ k apart; `b`: per BLayout, `ldb` ≥ its contiguous side;
  /// `c`: this rank's rows of C, shard_of(m, world size, rank) (comm/shard.h) of n elements, `ldc`
  /// ≥ n apart; may be null when they are none. Leading dimensions are in elements; none of the
  /// matrices may overlap another or lie in the workspace. `c` is undefined after an error.
  ///
  /// `mode` kAuto: as the estimate says (CpuOptions::rates); the statistics say which ran.
  ///
  /// A wrong argument (kInvalidArgument) changes nothing. Any other error breaks the operator for
  /// good: later launches answer the same error at once. With kTimeout a wait's deadline passed.
  /// With kAborted an abort word was set, or a local rank's launch failed. With kShapeMismatch
  /// ranks launched with different `m`.
  Result<LaunchStats> launch(const void* a, std::uint64_t lda, const void* b, std::uint64_t ldb,
                             void* c, std::uint64_t ldc, std::uint32_t m, Mode mode = Mode::kFused,
                             const void* bias = nullptr);

  const GemmRsPlan& plan() const;
  /// Launches so far: the epoch of the last one.
  std::uint32_t epoch() const;
  /// For traces.
  LaunchRunner& runner();

 private:
  class Impl;
  explicit GemmRsCpu(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace mk::kernels
