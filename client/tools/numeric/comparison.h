/// \file
/// What comparing results with a reference gives: every element against its expected value and its
/// own bound, and perhaps all of them by their mean square error.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "client/tools/numeric/outcome.h"

namespace mk::tools {

struct Comparison {
  std::uint64_t compared = 0;
  std::uint64_t wrong = 0;        ///< elements outside their bound, or of a wrong kind
  double worst_ratio = 0;         ///< the largest |error| / bound; a wrong kind counts as infinity
  double max_error = 0;           ///< of the elements that are, and should be, finite
  std::uint64_t first_wrong = 0;  ///< the first wrong element's index, as the caller counts

  /// For judge_mean(): elements that were given a mean square, and the sums of squares.
  std::uint64_t in_mean = 0;
  double squares = 0, squares_most = 0;

  /// Fewer elements have no mean to speak of.
  static constexpr std::uint64_t kInMeanMin = 1024;

  /// One element, of a kind that is right: where it is finite, within `bound` of `expected`. A
  /// bound of 0 asks for equality. `mean_square`: what its squared error is at most in the mean
  /// over inputs; 0: not known.
  void add(std::uint64_t index, double value, double expected, double bound, Outcome right,
           double mean_square = 0) {
    double ratio = std::numeric_limits<double>::infinity();
    bool within = right.allows(value);
    if (within && !std::isfinite(value)) {
      ratio = 0;
    } else if (within) {
      const double error = std::fabs(value - expected);
      within = error <= bound;  // not where the expected value is a NaN
      if (error == 0) {
        ratio = 0;
      } else if (bound > 0 && !std::isnan(error)) {
        ratio = error / bound;
      }
      if (std::isfinite(error)) {
        max_error = std::max(max_error, error);
        if (mean_square > 0 && std::isfinite(mean_square)) {
          ++in_mean;
          squares += error * error;
          squares_most += mean_square;
        }
      }
    }
    ++compared;
    if (!within && wrong++ == 0) first_wrong = index;
    worst_ratio = std::max(worst_ratio, ratio);
  }
  /// One element of the expected value's own kind: NaN equals NaN, an infinity the same infinity.
  void add(std::uint64_t index, double value, double expected, double bound) {
    add(index, value, expected, bound, Outcome::of(expected));
  }

  /// Takes in the comparison of further elements.
  void add(const Comparison& other) {
    if (wrong == 0 && other.wrong != 0) first_wrong = other.first_wrong;
    compared += other.compared;
    wrong += other.wrong;
    worst_ratio = std::max(worst_ratio, other.worst_ratio);
    max_error = std::max(max_error, other.max_error);
    in_mean += other.in_mean;
    squares += other.squares;
    squares_most += other.squares_most;
  }

  /// After all elements: where their mean square error is above that of right results, all are
  /// wrong. It finds what each element's own bound, made for the worst case, has room for.
  void judge_mean() {
    if (in_mean < kInMeanMin || squares <= squares_most) return;
    if (wrong == 0) first_wrong = 0;
    wrong = compared;
    worst_ratio = std::max(worst_ratio, std::sqrt(squares / squares_most));
  }
};

}  // namespace mk::tools
