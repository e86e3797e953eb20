/// \file
/// What comparing results with a reference gives: every element against its expected value and its
/// own bound.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace mk::tools {

struct Comparison {
  std::uint64_t compared = 0;
  std::uint64_t wrong = 0;        ///< elements outside their bound, NaN included
  double worst_ratio = 0;         ///< the largest |error| / bound; a NaN counts as infinity
  double max_error = 0;           ///< of the elements that are numbers
  std::uint64_t first_wrong = 0;  ///< the first wrong element's index, as the caller counts

  /// One element. A bound of 0 asks for equality.
  void add(std::uint64_t index, double value, double expected, double bound) {
    const double error = std::fabs(value - expected);
    const bool within = error <= bound;  // a NaN is not
    double ratio = std::numeric_limits<double>::infinity();
    if (error == 0) {
      ratio = 0;
    } else if (!std::isnan(error) && bound > 0) {
      ratio = error / bound;
    }
    ++compared;
    if (!within && wrong++ == 0) first_wrong = index;
    worst_ratio = std::max(worst_ratio, ratio);
    if (!std::isnan(error)) max_error = std::max(max_error, error);
  }

  /// Takes in the comparison of further elements.
  void add(const Comparison& other) {
    if (wrong == 0 && other.wrong != 0) first_wrong = other.first_wrong;
    compared += other.compared;
    wrong += other.wrong;
    worst_ratio = std::max(worst_ratio, other.worst_ratio);
    max_error = std::max(max_error, other.max_error);
  }
};

}  // namespace mk::tools
