/// \file
/// The roles of GEMM+AllReduce by name, as executors run them whose blocks are threads.
#pragma once

#include "kernels/ops/gemm_ar/roles.h"

namespace mk::kernels::gemm_ar {

/// `parts`: in so many a worker deals out its sums.
template <class Executor>
bool run_role(GemmArBlock<Executor>& block, Role role, std::uint32_t parts = 1) {
  switch (role) {
    case Role::kCompute:
      return compute(block);
    case Role::kCollect:
      return collect(block, block.launch.blocks.compute);
    case Role::kReduce:
      return reduce(block, parts);
    case Role::kSend:
      return send(block);
    default:
      return receive(block, parts);
  }
}

}  // namespace mk::kernels::gemm_ar
