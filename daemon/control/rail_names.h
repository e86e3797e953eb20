/// \file
/// Whether two nodes' rails are on NICs of the same names.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <vector>

namespace mk::daemon::control {

/// What differs between this node's NICs by rail and a peer's; empty: nothing. On a rail-optimised
/// network, NICs of different places in their nodes are not on one switch. A rail whose NIC has no
/// name is not compared.
inline std::string misalignment(const std::vector<std::string>& own,
                                const std::vector<std::string>& peer) {
  std::string text;
  for (std::size_t rail = 0; rail < std::min(own.size(), peer.size()); ++rail) {
    if (own[rail].empty() || peer[rail].empty() || own[rail] == peer[rail]) continue;
    text += fmt::format("{}rail {} is {} here and {} there", text.empty() ? "" : ", ", rail,
                        own[rail], peer[rail]);
  }
  return text;
}

}  // namespace mk::daemon::control
