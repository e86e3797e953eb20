/// \file
/// The roles of GEMM+Combine by name, for simulations.
#pragma once

#include "kernels/comm/launch.h"
#include "kernels/ops/combine/protocol.h"

namespace mk::kernels::testing {

template <class Block>
bool run_combine_role(Block& block, Role role) {
  switch (role) {
    case Role::kPlan:
      return gemm_combine::plan(block);
    case Role::kReduce:
      return gemm_combine::reduce(block);
    case Role::kSend:
      return gemm_combine::send(block);
    case Role::kReceive:
      return gemm_combine::receive(block);
    default:
      return gemm_combine::compute(block);
  }
}

}  // namespace mk::kernels::testing
