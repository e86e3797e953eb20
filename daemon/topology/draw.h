/// \file
/// A machine's GPUs and NICs as a tree, for people, and as JSON, for scripts.
#pragma once

#include <string>
#include <vector>

#include "daemon/topology/nic_choice.h"

namespace mk::topology {

/// The tree, then a line per rail: its NICs and why. `choices` may be empty.
std::string draw(const Machine& machine, const std::vector<RailChoice>& choices);
std::string to_json(const Machine& machine, const std::vector<RailChoice>& choices);

}  // namespace mk::topology
