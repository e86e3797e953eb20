/// \file
/// GEMM+AllReduce on the CPU: C[m,n] = sum over all ranks r of A_r[m,k_r] B_r[k_r,n], and every
/// rank gets C. Blocks are threads; what they do is kernels/ops/gemm_ar/roles.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kernels/comm/launch_stats.h"
#include "kernels/comm/rank_context.h"
#include "kernels/comm/types.h"
#include "kernels/cpu/launch_runner.h"
#include "kernels/ops/gemm_ar/spec.h"
#include "shm/host/result.h"

namespace mk::kernels {

/// One rank's operator. How to make one:
///
///     auto plan = GemmArPlan::make(world.nodes, world.locals, {m_max, n, k}, dtype, {});
///     // allocate and exchange: a zeroed workspace of plan->workspace_bytes() bytes,
///     plan->flag_count() arrival flags
///     // (zero as well), and compare plan->fingerprint() over all ranks
///     auto op = GemmArCpu::create(*plan, k, context, options);
///
/// Not thread-safe: one launch at a time, and one launch at a time over all operators that share
/// the context's lanes.
class GemmArCpu {
 public:
  /// Starts the blocks (threads that sleep between launches). `k` is this rank's own, any ≥ 1.
  /// Everything `context` points to outlives the operator. Errors: kInvalidArgument for a context
  /// that does not fit the plan, kUnsupported when oneDNN has no kernel for this machine, kSystem
  /// when threads cannot be started.
  static Result<std::unique_ptr<GemmArCpu>> create(const GemmArPlan& plan, std::uint32_t k,
                                                   const RankContext& context,
                                                   const GemmCpuOptions& options);
  ~GemmArCpu();
  GemmArCpu(const GemmArCpu&) = delete;
  GemmArCpu& operator=(const GemmArCpu&) = delete;

  /// Runs one launch; returns when this rank has all of C and no block touches memory of the caller
  /// any more. All ranks launch equally often and with the same `m` (1 ≤ m ≤ the plan's).
  ///
  /// `a`: m rows of k elements, `lda` ≥ k apart; `b`: per BLayout, `ldb` ≥ its contiguous side;
  /// `c`: m rows of the plan's result_columns() elements, `ldc` ≥ that apart, or null when
  /// `output()` is enough; `bias`: n elements, the same on all ranks, or null, as the plan says.
  /// Leading dimensions are in elements; `a` and `b` may not lie in the workspace. `c` is undefined
  /// after an error.
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

  /// C of the last launch, row-major, `plan().result_columns()` elements a row, in the workspace;
  /// overwritten by the next launch.
  const void* output() const;

  const GemmArPlan& plan() const;
  /// Launches so far: the epoch of the last one.
  std::uint32_t epoch() const;
  /// For traces.
  LaunchRunner& runner();

 private:
  class Impl;
  explicit GemmArCpu(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace mk::kernels
