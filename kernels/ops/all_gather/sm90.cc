#include "kernels/ops/ag_gemm/sm90.h"
#include "kernels/cuda/host/collective_operator.h"
#include "kernels/ops/all_gather/spec.h"

namespace mk::kernels {
namespace cuda {

const CollectiveKernel<AllGatherLaunch>& all_gather_kernel();  // sm90.cu

}  // namespace cuda
namespace {

struct AllGather {
  static constexpr const char* kName = "all_gather";
  using Plan = AllGatherPlan;
  using Launch = AllGatherLaunch;
  static constexpr Role kStreams = Role::kShare;
  static constexpr Role kCaller = Role::kCollect;

  static Status check_rows(const Plan& plan) {
    constexpr std::uint32_t kCopied = 16;  // bytes
    if (plan.gather.row_bytes % kCopied == 0) return {};
    return fail(
        ErrorCode::kInvalidArgument,
        "{}: rows of {} bytes ({} elements of {}); on a GPU they are a multiple of {} bytes: "
        "pad them",
        kName, plan.gather.row_bytes, plan.n, name_of(plan.dtype), kCopied);
  }
  static bool streams(const World& world) { return world.size() > 1; }
  static bool receives(const World& world) { return world.nodes > 1 && world.locals > 1; }
  static FlagMap flags(const Plan& plan) {
    return {plan.nodes, plan.gather.banks, plan.gather.chunks_max};
  }
  static const cuda::CollectiveKernel<Launch>& kernel(const Plan&) {
    return cuda::all_gather_kernel();
  }
  static void settle(Launch& launch) {
    launch.sharing =
        ag_gemm_sharing(launch.schedule, launch.blocks, launch.rows.rows, /*by_dma=*/false);
    launch.onward = ag_gemm_passing_on(launch.schedule, launch.blocks, launch.m, /*by_dma=*/false);
    launch.collect_parts = ag_gemm_collect_parts(launch.schedule, launch.blocks, launch.m);
  }
};

}  // namespace

Result<std::unique_ptr<CollectiveCuda>> make_all_gather_cuda(const AllGatherPlan& plan,
                                                             const RankContext& context,
                                                             const CudaOptions& options) {
  return cuda::CollectiveCudaOperator<AllGather>::create(plan, context, options);
}

}  // namespace mk::kernels
