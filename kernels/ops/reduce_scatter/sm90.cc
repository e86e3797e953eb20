#include "kernels/cuda/host/collective_operator.h"
#include "kernels/ops/reduce_scatter/spec.h"

namespace mk::kernels {
namespace cuda {

const CollectiveKernel<ReduceScatterLaunch>& reduce_scatter_kernel(
    kernels::DType dtype);  // sm90.cu

}  // namespace cuda
namespace {

/// A thread of the workers adds so many at a time, of any type.
constexpr std::uint32_t kElementsOfVector = 8;

struct ReduceScatter {
  static constexpr const char* kName = "reduce_scatter";
  using Plan = ReduceScatterPlan;
  using Launch = ReduceScatterLaunch;
  static constexpr Role kStreams = Role::kReduce;
  static constexpr Role kCaller = Role::kCompute;

  static Status check_rows(const Plan& plan) {
    if (plan.n % kElementsOfVector == 0) return {};
    return fail(ErrorCode::kInvalidArgument,
                "{}: rows of {} elements; on a GPU they are a multiple of {}: pad them", kName,
                plan.n, kElementsOfVector);
  }
  static bool streams(const World& world) { return world.locals > 1; }
  static bool receives(const World& world) { return world.nodes > 1; }
  static FlagMap flags(const Plan& plan) { return plan.sums.flags(); }
  static const cuda::CollectiveKernel<Launch>& kernel(const Plan& plan) {
    return cuda::reduce_scatter_kernel(plan.dtype);
  }
  /// Few chunks are cut into parts, two for each warpgroup, of 8 KiB at least.
  static void settle(Launch& launch) {
    const std::uint32_t most = std::max(1u, launch.plan.chunk_bytes / (8 << 10));
    const auto parts = [most](std::uint32_t chunks, std::uint32_t groups) {
      if (chunks == 0 || chunks > cuda::kFewChunks) return 1u;
      return std::clamp(2 * groups / chunks, 1u, most);
    };
    const World& world = launch.context.world;
    launch.reduce_parts = parts(launch.pieces_reduced(), launch.blocks.reduce);
    launch.receive_parts =
        parts(launch.schedule.packed(world.rank()).chunks(), launch.blocks.receive);
  }
};

}  // namespace

Result<std::unique_ptr<CollectiveCuda>> make_reduce_scatter_cuda(const ReduceScatterPlan& plan,
                                                                 const RankContext& context,
                                                                 const CudaOptions& options) {
  return cuda::CollectiveCudaOperator<ReduceScatter>::create(plan, context, options);
}

}  // namespace mk::kernels
