/// \file
/// Ranks as people read them.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace mk::daemon::control {

/// Ascending `ranks` grouped by node, ranges folded: "rank 1 (node rank 0), ranks 4-7 (node rank
/// 1)". "none" when empty. With many nodes it ends with how many ranks more there are.
std::string describe_ranks(std::span<const std::uint32_t> ranks, std::uint32_t local_size);

}  // namespace mk::daemon::control
