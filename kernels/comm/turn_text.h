/// \file
/// For people: operators that share a workspace, when one of them fails.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "kernels/comm/launch.h"
#include "kernels/comm/workspace_turn.h"
#include "shm/host/result.h"

namespace mk::kernels {

/// The ranks that are seen to be in launches of other operators of the workspace than `sharer`,
/// with a hint; empty: none. Looks at this rank's memory alone: at local ranks' records and at rail
/// peers' flags.
std::string text_of_other_launches(const WorkspaceTurn& turn, std::uint32_t sharer);

/// The error of launch `launch` of the operator named `op` whose turn did not come.
Error describe_turn(const WorkspaceTurn& turn, const Launch& launch, std::string_view op);

/// The error of the operator named `op` when `failed`, of the same workspace, has failed.
Error describe_shared_failure(const WorkspaceTurn& turn, std::uint32_t failed, std::string_view op);

}  // namespace mk::kernels
