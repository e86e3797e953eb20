/// \file
/// AllGather + GEMM on Hopper GPUs: C_r[m,n_r] = A[m,k] B_r[k,n_r], where each rank brings its
/// share of A's rows. One launch is one persistent kernel per rank.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "kernels/ag_gemm/plan.h"
#include "kernels/comm/rank_context.h"
#include "kernels/comm/types.h"
#include "kernels/cuda/ag_gemm/launch_arguments.h"
#include "kernels/cuda/operator_base.h"
#include "shm/host/result.h"

namespace mk::kernels {

/// Tiles and chunks that suit the GPU, for AgGemmPlan::make. `blocks`: compute blocks of one rank,
/// the same on all. `rates`: by which its tiles, its own affair, are short or whole (gpu_rates.h).
Tiling ag_gemm_cuda_tiling(std::uint32_t nodes, std::uint32_t locals, Shape max,
                           std::uint32_t blocks, const MachineRates& rates);

/// Whether a plan's rows are shared (and over nodes passed on) mainly by the compute blocks' spare
/// warps (see CudaOptions::spare_warps), where its ranks have a GPU each: of products that have
/// many whole tiles and take longer than these warps do, and the network, by `rates`. The SMs that
/// are kept from the product are then no more than it cannot have (kBlocksMax), where groups would
/// take so many that it needs a turn of tiles more.
bool ag_gemm_spare_warps_share(const AgGemmPlan& plan, const MachineRates& rates);
/// The pace of `warps` of them, with `groups` groups beside them: FrameArguments::spare_ns_per_kib.
std::uint32_t ag_gemm_spare_ns_per_kib(const AgGemmPlan& plan, const MachineRates& rates,
                                       std::uint32_t warps, std::uint32_t groups);

/// Groups that share a rank's rows where its spare warps don't, of a whole GPU and of 128 threads
/// each. Those that do nothing else take tiles when the rows are shared.
std::uint32_t ag_gemm_share_groups(std::uint32_t nodes, std::uint32_t locals, const Shape& max);

/// In how many parts, and in which order, a rank's groups hand out its `rows` rows, and in how many
/// parts those that come over the network in a launch of m rows.
gather::Sharing ag_gemm_sharing(const GatherSchedule& schedule, const RoleBlocks& blocks,
                                std::uint32_t rows, bool by_spare_warps);
std::uint32_t ag_gemm_received_parts(const GatherSchedule& schedule, const RoleBlocks& blocks,
                                     std::uint32_t m, bool by_spare_warps);

/// One rank's operator, on the device that was current at creation. Not thread-safe, except that
/// `status()` may be asked from any thread. What holds for creation and launches of GemmArCuda
/// holds here.
class AgGemmCuda : public cuda::OperatorBase<AgGemmPlan, cuda::AgGemmArguments> {
 public:
  static Result<std::unique_ptr<AgGemmCuda>> create(const AgGemmPlan& plan,
                                                    const RankContext& context,
                                                    const CudaOptions& options);

  /// `a_shard`: this rank's rows of A, shard_of(m, world size, rank) of k elements, `lda` apart;
  /// may be null when they are none. `b`: per BLayout, `ldb` apart; `c`: m rows of n elements,
  /// `ldc` apart; `gathered`: null, or room for the whole A, m rows of k elements without gaps.
  /// None of them may overlap another or lie in the workspace, but for a shard at `input()`.
  /// Addresses are multiples of 16 bytes, n, k and leading dimensions multiples of 8.
  Status launch(cudaStream_t stream, const void* a_shard, std::uint64_t lda, const void* b,
                std::uint64_t ldb, void* c, std::uint64_t ldc, std::uint32_t m,
                Mode mode = Mode::kFused, void* gathered = nullptr);
  /// See AgGemmPlan::input. A launch with a shard elsewhere may overwrite it.
  void* input() const { return plan_.input(arguments_.launch.context); }
  /// Whether the node's rows are shared rank by rank (gather::share_in_turn).
  bool shares_in_turn() const { return arguments_.launch.in_turn; }

 private:
  using OperatorBase::OperatorBase;
  Status start(const RankContext& context, const CudaOptions& options);
  Status make_maps(void* c, std::uint64_t ldc, std::uint32_t m);
};

}  // namespace mk::kernels
