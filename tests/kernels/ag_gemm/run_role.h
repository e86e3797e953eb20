/// \file
/// The roles of AllGather+GEMM by name, for simulations.
#pragma once

#include "kernels/comm/launch.h"
#include "kernels/ops/ag_gemm/protocol.h"

namespace mk::kernels::testing {

template <class Block>
bool run_ag_gemm_role(Block& block, Role role) {
  switch (role) {
    case Role::kCompute:
      return ag_gemm::compute(block);
    case Role::kCollect:
      return ag_gemm::collect(block);
    case Role::kShare:
      return ag_gemm::share(block);
    case Role::kSend:
      return ag_gemm::send(block);
    default:
      return ag_gemm::receive(block);
  }
}

}  // namespace mk::kernels::testing
