#include "daemon/control/ranks.h"

#include <fmt/format.h>

namespace mk::daemon::control {

namespace {

/// One node's ranks: "rank 1", "ranks 4-7", "ranks 4, 6-7".
std::string fold(std::span<const std::uint32_t> ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t first = 0; first < ranks.size();) {
    std::size_t last = first;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    if (first > 0) text += ", ";
    text += first == last ? fmt::format("{}", ranks[first])
                          : fmt::format("{}-{}", ranks[first], ranks[last]);
    first = last + 1;
  }
  return text;
}

}  // namespace

std::string describe_ranks(std::span<const std::uint32_t> ranks, std::uint32_t local_size) {
  constexpr std::size_t kNodesShown = 16;
  if (ranks.empty()) return "none";
  std::string text;
  std::size_t shown = 0;
  for (std::size_t first = 0; first < ranks.size(); ++shown) {
    if (shown == kNodesShown)
      return text + fmt::format(", and {} ranks more", ranks.size() - first);
    const std::uint32_t node = ranks[first] / local_size;
    std::size_t end = first;
    while (end < ranks.size() && ranks[end] / local_size == node) ++end;
    if (first > 0) text += ", ";
    text += fmt::format("{} (node rank {})", fold(ranks.subspan(first, end - first)), node);
    first = end;
  }
  return text;
}

}  // namespace mk::daemon::control
