/// \file
/// A machine's GPUs and NICs as a tree, for users, and as JSON, for scripts.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "daemon/topology/nic_choice.h"

namespace mk::topology {

/// A rank of the running daemon.
struct PlacedRank {
  std::string job;
  std::uint32_t rank = 0, rail = 0;
  std::string gpu, cpus, why;  ///< SessionInfo's
};
/// Config::gpu_rails.
using GpuRails = std::map<std::string, std::uint32_t>;

/// The tree, then a line per rail (its NICs and why), then one per rank: its rail, and what decided
/// that. `choices`, `ranks` and `configured` may be empty.
std::string draw(const Machine& machine, const std::vector<RailChoice>& choices,
                 const std::vector<PlacedRank>& ranks = {}, const GpuRails& configured = {});
std::string to_json(const Machine& machine, const std::vector<RailChoice>& choices,
                    const std::vector<PlacedRank>& ranks = {}, const GpuRails& configured = {});

}  // namespace mk::topology
