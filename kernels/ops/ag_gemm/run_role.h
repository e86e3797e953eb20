/// \file
/// The roles of AllGather+GEMM by name, as executors run them whose blocks are threads.
#pragma once

#include "kernels/ops/ag_gemm/roles.h"

namespace mk::kernels::ag_gemm {

template <class Executor>
bool run_role(AgGemmBlock<Executor>& block, Role role) {
  switch (role) {
    case Role::kCompute:
      return compute(block);
    case Role::kCollect:
      return collect(block);
    case Role::kShare:
      return share(block);
    case Role::kSend:
      return send(block);
    default:
      return receive(block);
  }
}

}  // namespace mk::kernels::ag_gemm
