/// \file
/// AllGather+GEMM on Hopper GPUs: C_r[m,n_r] = A[m,k] B_r[k,n_r], where each rank brings its
/// share of A's rows. One launch is one persistent kernel per rank.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "kernels/comm/rank_context.h"
#include "kernels/comm/types.h"
#include "kernels/cuda/host/operator_base.h"
#include "kernels/cuda/host/row_engines.h"
#include "kernels/ops/ag_gemm/sm90_arguments.h"
#include "kernels/ops/ag_gemm/spec.h"
#include "shm/host/result.h"

namespace mk::kernels {

/// Bytes that DMA engines bring to a rank at a time: all of a rank's rows. On one node it is less
/// for a longer product (of so many microseconds), as its last tiles wait for it; but each time
/// costs. Whole chunks of the plan.
std::uint32_t ag_gemm_dma_bytes(const AgGemmPlan& plan, double product_us);

/// In how many parts, and in which order, a rank's groups hand out its `rows` rows, and those that
/// come over the network in a launch of m rows. `by_dma`: DMA engines bring the rows, and pass on
/// what they can.
gather::Sharing ag_gemm_sharing(const GatherSchedule& schedule, const RoleBlocks& blocks,
                                std::uint32_t rows, bool by_dma);
gather::PassingOn ag_gemm_passing_on(const GatherSchedule& schedule, const RoleBlocks& blocks,
                                     std::uint32_t m, bool by_dma);
/// In how many parts `blocks.compute` blocks bring each chunk of all m rows to the caller.
std::uint32_t ag_gemm_collect_parts(const GatherSchedule& schedule, const RoleBlocks& blocks,
                                    std::uint32_t m);

/// One rank's operator, on the device that was current at creation. Not thread-safe, except that
/// `status()` may be asked from any thread. What holds for creation and launches of GemmArCuda
/// holds here.
class AgGemmCuda : public cuda::OperatorBase<AgGemmPlan, cuda::AgGemmArguments> {
 public:
  static Result<std::unique_ptr<AgGemmCuda>> create(const AgGemmPlan& plan,
                                                    const RankContext& context,
                                                    const CudaOptions& options);

  /// `of`: rows shard_of(m, world size, rank) of A, and all m rows of C, of result_columns()
  /// elements. None of them may overlap another or lie in the workspace, but for a shard at
  /// `input()`. n and k are multiples of 8.
  Status launch(cudaStream_t stream, const GemmMatrices& of, std::uint32_t m,
                Mode mode = Mode::kFused);
  /// See AgGemmPlan::input. A launch with a shard elsewhere may overwrite it.
  void* input() const { return plan_.input(arguments_.launch.context); }
  /// How the rows of the node's other ranks arrive.
  Arrival arrival() const { return arguments_.launch.arrival; }
  /// What DMA engines bring to a rank at a time.
  std::uint32_t dma_bytes() const { return dma_bytes_; }
  /// Whether they also pass on what comes over the network.
  bool passes_on_by_dma() const {
    return engines_.used() && world().nodes > 1 && plan_.gather.banks == 1;
  }

 private:
  AgGemmCuda(const char* op, const AgGemmPlan& plan, BLayout b_layout)
      : OperatorBase(op, plan, plan.max.k, b_layout), engines_(op) {}
  Status start(const RankContext& context, const CudaOptions& options);
  Status plan_with(const RankContext& context, const CudaOptions& options);
  Status check_dma(const RankContext& context, const CudaOptions& options) const;
  Status create_engines(const CudaOptions& options);
  Status make_maps(void* c, std::uint64_t ldc, std::uint32_t m);
  Status bring(cuda::DmaQueue& queue) const;
  bool spans(std::uint32_t m) const;

  std::optional<bool> spans_;  ///< CudaOptions::spans
  cuda::RowEngines engines_;
  std::uint32_t dma_bytes_ = 0;
};

}  // namespace mk::kernels
