/// \file
/// GEMM+ReduceScatter on Hopper GPUs: rank r gets the rows shard_of(m, W, r) of C[m,n] = sum over
/// all ranks of A_r[m,k_r] B_r[k_r,n]. One launch is one persistent kernel per rank.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "kernels/comm/rank_context.h"
#include "kernels/comm/types.h"
#include "kernels/cuda/host/operator_base.h"
#include "kernels/ops/gemm_rs/schedule.h"
#include "kernels/ops/gemm_rs/sm90_arguments.h"
#include "kernels/ops/gemm_rs/spec.h"
#include "shm/host/result.h"

namespace mk::kernels {

/// One rank's operator, on the device that was current at creation. Not thread-safe, except that
/// `status()` may be asked from any thread. What holds for creation and launches of GemmArCuda
/// holds here.
class GemmRsCuda : public cuda::OperatorBase<GemmRsPlan, cuda::GemmRsArguments> {
 public:
  static Result<std::unique_ptr<GemmRsCuda>> create(const GemmRsPlan& plan, std::uint32_t k,
                                                    const RankContext& context,
                                                    const CudaOptions& options);

  /// `of`: m rows of A, and this rank's rows of C, null when they are none. n and k are multiples
  /// of 8.
  Status launch(cudaStream_t stream, const GemmMatrices& of, std::uint32_t m,
                Mode mode = Mode::kFused);

 private:
  using OperatorBase::OperatorBase;
  Status start(const RankContext& context, const CudaOptions& options);
  Status make_places(const GemmRsSchedule& schedule, void* c, std::uint64_t ldc);
};

}  // namespace mk::kernels
