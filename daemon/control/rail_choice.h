/// \file
/// Which rail serves a session. Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

namespace mk::daemon::control {

/// What the choice goes by.
struct RailQuestion {
  std::uint32_t local_rank = 0;
  std::uint32_t local_size = 1;         ///< ranks of the job on this node
  std::span<const std::uint32_t> load;  ///< sessions on each rail; at least one rail
  std::span<const std::uint32_t>
      near;  ///< rails that are nearest to the rank's GPU; empty: unknown
  /// Rail of the job's local rank 0, where one of its ranks was placed by number before.
  std::optional<std::uint32_t> first;
};

struct RailChoice {
  std::uint32_t rail = 0;
  /// For `RailQuestion::first` of the job's later ranks, where this one has its rail by its number.
  std::optional<std::uint32_t> first;
};

/// A rank whose GPU is near some rails gets the one of them with the least load. Without a GPU a
/// job's ranks take rails in turn, from one where they meet the fewest sessions of others. Nodes
/// with the same load choose alike, whatever the order in which ranks come.
RailChoice choose_rail(const RailQuestion& question);

}  // namespace mk::daemon::control
