#include "kernels/cuda/skeleton/collective_kernel.cuh"
#include "kernels/ops/reduce_scatter/protocol.h"

namespace mk::kernels::cuda {
namespace {

/// Copies by the workers that sum, as sums of one source.
class ReduceScatterLeader : public Leader {
 public:
  using Leader::Leader;
  __device__ void set_launch(const ReduceScatterLaunch& launch) { launch_ = &launch; }

  /// The rank's rows of the tile, in the type of partials, or of one rank alone as they are.
  __device__ bool multiply(const TileRect& rect, void* target, std::uint64_t target_stride) {
    const ReduceScatterLaunch& launch = *launch_;
    // Numbers in fp32 are copied as two elements each.
    const std::uint32_t wide = bytes_of(launch.dtype) / kElementBytes;
    const bool alone = launch.context.world.size() == 1;
    const std::uint64_t n = launch.plan.max.n;
    SumJob job;
    job.add_source(launch.input +
                   (rect.row * n + rect.column) * std::uint64_t{wide} * kElementBytes);
    job.source_stride = n * wide;
    job.target_count = 1;
    job.targets[0] = target;
    job.target_stride = alone ? target_stride : target_stride * wide;
    if (wide == 1 && !alone) job.target_type = launch.plan.partials;
    job.rows = rect.rows;
    job.columns = rect.columns * wide;
    Leader::sum(job);
    return true;
  }
  __device__ void sum(SumJob& job) {
    reduce_scatter::settle_types(*launch_, job);
    Leader::sum(job);
  }
  __device__ void* c_at(const TileRect& rect) const {
    return reduce_scatter::result_at(*launch_, rect);
  }
  __device__ std::uint64_t c_stride() const { return reduce_scatter::result_stride(*launch_); }

 private:
  const ReduceScatterLaunch* launch_ = nullptr;
};

template <class ElementType>
struct ReduceScatterOp : MultipliesNothing {
  struct Config {
    using Element = ElementType;
  };
  using Launch = ReduceScatterLaunch;
  template <class AnyExecutor>
  using Block = GemmRsBlock<AnyExecutor>;
  using Executor = ReduceScatterLeader;
  static constexpr Role kStreams = Role::kReduce;
  static constexpr Role kCaller = Role::kCompute;
  static constexpr bool kRounds = false;  ///< no shard is summed once

  static __device__ bool run(Group<ReduceScatterOp>& group, Block<Executor>& block) {
    block.executor.set_launch(group.launch);
    return reduce_scatter::run_role(block, group.launch);
  }
};

}  // namespace

const CollectiveKernel<ReduceScatterLaunch>& reduce_scatter_kernel(kernels::DType dtype) {
  return dtype == kernels::DType::kF16 ? kCollectiveKernel<ReduceScatterOp<__half>>
                                       : kCollectiveKernel<ReduceScatterOp<__nv_bfloat16>>;
}

}  // namespace mk::kernels::cuda
