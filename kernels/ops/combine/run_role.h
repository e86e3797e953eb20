/// \file
/// The roles of GEMM+Combine by name, as executors run them whose blocks are threads.
#pragma once

#include <vector>

#include "kernels/cpu/launch_runner.h"
#include "kernels/ops/combine/protocol.h"

namespace mk::kernels::gemm_combine {

inline std::vector<RoleThread> threads_of(const RoleBlocks& blocks, const World& world) {
  std::vector<RoleThread> threads;
  add_role(threads, Role::kCompute, blocks.compute);
  add_role(threads, Role::kPlan, blocks.plan);
  add_role(threads, Role::kReceive, blocks.receive);
  if (world.nodes > 1) add_role(threads, Role::kReduce, blocks.reduce);
  if (world.nodes > 1) add_role(threads, Role::kSend, blocks.send);
  return threads;
}
template <class Executor>
bool run_role(CombineBlock<Executor>& block, Role role) {
  switch (role) {
    case Role::kPlan:
      return plan(block);
    case Role::kReduce:
      return reduce(block);
    case Role::kSend:
      return send(block);
    case Role::kReceive:
      return receive(block);
    default:
      return compute(block);
  }
}

}  // namespace mk::kernels::gemm_combine
