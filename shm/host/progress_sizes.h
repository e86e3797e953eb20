/// \file
/// Progress::sizes as the host reads them, and by name.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "shm/atomic.h"
#include "shm/progress.h"

namespace mk::shm {

using ProgressSizes = std::array<std::uint32_t, kProgressSizes>;

inline ProgressSizes sizes_of(const Progress& words) {
  ProgressSizes sizes{};
  for (std::uint32_t i = 0; i < kProgressSizes; ++i) sizes[i] = load_relaxed(&words.sizes[i]);
  return sizes;
}

/// Calls visit(name, size) for what has been told of the operator's shape, beside m.
template <class Sizes, class Visit>
void for_each_size(std::string_view op, const Sizes& sizes, Visit&& visit) {
  const auto& names = kProgressSizeNames[progress_operator(op)];
  std::uint32_t i = 0;
  for (const std::uint32_t size : sizes) {
    if (i < kProgressSizes && !names[i].empty() && size != 0) visit(names[i], size);
    ++i;
  }
}

}  // namespace mk::shm
