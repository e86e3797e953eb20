#include "kernels/cuda/skeleton/collective_kernel.cuh"
#include "kernels/ops/all_gather/protocol.h"

namespace mk::kernels::cuda {
namespace {

struct AllGatherOp : MultipliesNothing {
  struct Config {
    using Element = __nv_bfloat16;
  };
  using Launch = AllGatherLaunch;
  template <class AnyExecutor>
  using Block = AllGatherBlock<AnyExecutor>;
  using Executor = CopyLeader;
  static constexpr Role kStreams = Role::kShare;
  static constexpr Role kCaller = Role::kCollect;

  static __device__ bool run(Group<AllGatherOp>&, Block<Executor>& block) {
    return all_gather::run_role(block);
  }
};

}  // namespace

const CollectiveKernel<AllGatherLaunch>& all_gather_kernel() {
  return kCollectiveKernel<AllGatherOp>;
}

}  // namespace mk::kernels::cuda
