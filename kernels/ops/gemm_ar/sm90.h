/// \file
/// GEMM+AllReduce on Hopper GPUs: C[m,n] = sum over all ranks r of A_r[m,k_r] B_r[k_r,n], and
/// every rank gets C. One launch is one persistent kernel per rank.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "kernels/comm/rank_context.h"
#include "kernels/comm/types.h"
#include "kernels/cuda/host/operator_base.h"
#include "kernels/ops/gemm_ar/schedule.h"
#include "kernels/ops/gemm_ar/sm90_arguments.h"
#include "kernels/ops/gemm_ar/spec.h"
#include "shm/host/result.h"

namespace mk::kernels {

/// One rank's operator, on the device that was current at creation. Not thread-safe, except that
/// `status()` may be asked from any thread.
class GemmArCuda : public cuda::OperatorBase<GemmArPlan, cuda::GemmArArguments> {
 public:
  /// `context`: see kernels/cuda/README.md for what its addresses must be. `k`: this rank's own.
  /// The kernel is loaded here: no rank may launch before all ranks of the process have created
  /// their operators. (Loading waits for the device to be idle.)
  ///
  /// Errors: kInvalidArgument; kUnsupported for a device that is no Hopper, tiles larger than 128 x
  /// 256; kLimitExceeded when the blocks do not fit on this rank's share.
  static Result<std::unique_ptr<GemmArCuda>> create(const GemmArPlan& plan, std::uint32_t k,
                                                    const RankContext& context,
                                                    const CudaOptions& options);

  /// Puts one launch on the stream and returns at once. May be captured into a graph, which then
  /// replays it with the same addresses and `m`, each time as a launch of its own. Launches of one
  /// operator do not overlap. All ranks launch equally often and with the same `m`. Ranks that
  /// share a device launch on streams of their own.
  ///
  /// `a`: m rows of k elements, `lda` apart; `b`: per BLayout, `ldb` apart; `c`: m rows of the
  /// plan's result_columns() elements, `ldc` apart, or null when `output()` is enough (and faster).
  /// `bias`: n elements, the same on all ranks, or null, as the plan says. Addresses are multiples
  /// of 16 bytes, n, k and leading dimensions multiples of 8.
  ///
  /// kInvalidArgument changes nothing. A launch that fails while it runs breaks the operator for
  /// good: it ends, with C undefined, as do all later ones; `status()` and later calls give its
  /// error.
  Status launch(cudaStream_t stream, const void* a, std::uint64_t lda, const void* b,
                std::uint64_t ldb, void* c, std::uint64_t ldc, std::uint32_t m,
                Mode mode = Mode::kFused, const void* bias = nullptr);

  /// C of the last launch, row-major, `plan().result_columns()` elements a row, in the workspace;
  /// overwritten by the next launch of any rank.
  const void* output() const { return workspace(world().local) + plan_.layout.out; }

 private:
  using OperatorBase::OperatorBase;
  Status start(const RankContext& context, const CudaOptions& options);
  Status make_places(const GemmArSchedule& schedule);

  bool accumulates_own_ = false;  ///< where a launch's tiles are of whole pieces
};

}  // namespace mk::kernels
