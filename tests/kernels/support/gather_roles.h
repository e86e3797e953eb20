/// \file
/// The threads of a gather (kernels/gather/roles.h), for simulations.
#pragma once

#include <vector>

#include "kernels/comm/launch.h"
#include "kernels/cpu/launch_runner.h"

namespace mk::kernels::testing {

/// Its roles, where the world has a use for them.
inline void add_gather_roles(std::vector<RoleThread>& threads, const World& world,
                             const RoleBlocks& blocks) {
  if (world.size() > 1) add_role(threads, Role::kShare, blocks.share);
  if (world.nodes > 1) add_role(threads, Role::kSend, blocks.send);
  if (world.nodes > 1 && world.locals > 1) add_role(threads, Role::kReceive, blocks.receive);
}

}  // namespace mk::kernels::testing
