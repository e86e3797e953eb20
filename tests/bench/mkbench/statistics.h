/// \file
/// Order statistics of a sample.
#pragma once

#include <algorithm>
#include <cstddef>
#include <nlohmann/json.hpp>
#include <vector>

namespace mk::bench {

struct Summary {
  std::size_t count = 0;
  double median = 0, p25 = 0, p75 = 0, min = 0, max = 0;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Summary, count, median, p25, p75, min, max)

/// The quantile `q` of sorted values, linear between neighbours.
inline double quantile(const std::vector<double>& sorted, double q) {
  const double position = q * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<std::size_t>(position);
  const std::size_t above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (position - static_cast<double>(below)) * (sorted[above] - sorted[below]);
}

inline Summary summarise(std::vector<double> values) {
  if (values.empty()) return {};
  std::sort(values.begin(), values.end());
  return {values.size(),          quantile(values, 0.5), quantile(values, 0.25),
          quantile(values, 0.75), values.front(),        values.back()};
}

}  // namespace mk::bench
