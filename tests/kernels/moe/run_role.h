/// \file
/// The roles of MoE Dispatch+GEMM by name, for simulations.
#pragma once

#include "kernels/comm/launch.h"
#include "kernels/ops/moe/roles.h"

namespace mk::kernels::testing {

template <class Block>
bool run_moe_dispatch_role(Block& block, Role role) {
  switch (role) {
    case Role::kPlan:
      return moe_dispatch::plan(block);
    case Role::kPull:
      return moe_dispatch::pull(block);
    case Role::kShare:
      return moe_dispatch::share(block);
    case Role::kSend:
      return moe_dispatch::send(block);
    case Role::kReceive:
      return moe_dispatch::receive(block);
    default:
      return moe_dispatch::compute(block);
  }
}

}  // namespace mk::kernels::testing
