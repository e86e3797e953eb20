/// \file
/// A failed wait in words.
#pragma once

#include <string_view>

#include "kernels/comm/wait.h"
#include "kernels/comm/world.h"
#include "shm/host/result.h"

namespace mk::kernels {

/// What `record` says, as the error of launch `epoch` of the operator named `op` on the rank of
/// `world`. `peer_failed` is the word of WaitControl: 1 + the rank whose launch failed.
Error describe(const WaitRecord& record, std::string_view op, std::uint32_t epoch,
               const World& world, std::uint32_t peer_failed);

}  // namespace mk::kernels
