#include "daemon/control/rail_choice.h"

#include <algorithm>

namespace mk::daemon::control {

namespace {

/// The rail of local rank 0 with which the job's ranks meet the fewest sessions; the first of
/// equals.
std::uint32_t best_first(const RailQuestion& question) {
  const auto rails = static_cast<std::uint32_t>(question.load.size());
  std::uint64_t least = UINT64_MAX;
  std::uint32_t best = 0;
  for (std::uint32_t first = 0; first < rails; ++first) {
    std::uint64_t met = 0;
    for (std::uint32_t local = 0; local < question.local_size; ++local)
      met += question.load[(first + local) % rails];
    if (met >= least) continue;
    least = met;
    best = first;
  }
  return best;
}

}  // namespace

RailChoice choose_rail(const RailQuestion& question) {
  const auto rails = static_cast<std::uint32_t>(question.load.size());
  if (!question.near.empty()) {
    return {*std::ranges::min_element(question.near, {},
                                      [&](std::uint32_t rail) { return question.load[rail]; }),
            std::nullopt};
  }
  const std::uint32_t first = question.first ? *question.first : best_first(question);
  return {(first + question.local_rank) % rails, first};
}

}  // namespace mk::daemon::control
