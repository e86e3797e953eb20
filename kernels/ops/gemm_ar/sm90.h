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
  /// `of`: m rows of A and of C, of the plan's result_columns() elements; C null when `output()` is
  /// enough (and faster). n and k are multiples of 8.
  ///
  /// kInvalidArgument changes nothing. A launch that fails while it runs breaks the operator for
  /// good: it ends, with C undefined, as do all later ones; `status()` and later calls give its
  /// error.
  Status launch(cudaStream_t stream, const GemmMatrices& of, std::uint32_t m,
                Mode mode = Mode::kFused);

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
