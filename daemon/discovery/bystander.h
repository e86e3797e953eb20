/// \file
/// Who the other nodes are, for somebody who is no node, such as the doctor: the source is asked as
/// a daemon asks it, and nothing is registered there.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "daemon/config/config.h"

namespace mk::daemon {

struct Sighting {
  std::optional<std::uint32_t> node;  ///< nothing: nobody there has said which node it is
  Address address;
  std::string trouble{};  ///< why a daemon of this configuration would not call it; empty: it would
};

/// The nodes of [[peer]], then those found beside them by the configuration's discovery, without
/// this node itself. Takes a few seconds at most where somebody does not answer.
Result<std::vector<Sighting>> find_nodes(const Config& config);

}  // namespace mk::daemon
