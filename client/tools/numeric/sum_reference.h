/// \file
/// The sum of rows over ranks in float64, with a bound for every element.
///
/// C = sum over nodes n of Q_n, Q_n = sum over n's L ranks r of x_r, in rank order. Sums are fp32
/// (u = 2^-24). With several nodes of several ranks each Q_n is rounded to the element type (unit
/// roundoff v), unless partials are fp32, and C is at the end. Hence, to first order,
///
///   |error| <= u (L + N) sum_r |x_r| + v |C| + [rounded] v sum_n |Q_n|
///
/// and a factor of 1 + 4 v covers the rest. f16 adds half of its smallest unit per rounding.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "client/tools/numeric/comparison.h"
#include "client/tools/numeric/elements.h"

namespace mk::tools {

class SumReference {
 public:
  /// The sum of `count` elements.
  SumReference(std::uint64_t count, std::uint32_t nodes, std::uint32_t locals, DataType type,
               Partials partials = Partials::kElement)
      : nodes_(nodes),
        locals_(locals),
        type_(type),
        rounds_nodes_(nodes > 1 && locals > 1 && partials == Partials::kElement),
        sums_(count) {}

  /// The elements of the next rank, in node-major order.
  void add_rank(const std::uint16_t* elements) {
    const bool closes = ++ranks_ % locals_ == 0;
    for (std::uint64_t i = 0; i < sums_.size(); ++i) {
      Sum& sum = sums_[i];
      const double value = to_float(type_, elements[i]);
      sum.node_outcome = sum.node_outcome + Outcome::of(value);
      if (std::isfinite(value)) {
        sum.node += value;
        sum.node_magnitude += std::fabs(value);
      }
      if (closes) close_node(sum);
    }
  }
  /// After all ranks: compares every element.
  Comparison compare(const std::uint16_t* found) const {
    const double v = unit_roundoff(type_);
    Comparison result;
    for (std::uint64_t i = 0; i < sums_.size(); ++i) {
      const Sum& sum = sums_[i];
      const double rounded = std::fabs(sum.whole) + (rounds_nodes_ ? sum.nodes : 0);
      const double least = type_ == DataType::kF16 ? 0x1p-25 * (nodes_ + 1) : 0;
      const double bound =
          nodes_ * locals_ == 1
              ? 0
              : (1 + 4 * v) *
                    (kUnitRoundoffFp32 * (locals_ + nodes_) * sum.magnitude + v * rounded + least);
      result.add(i, to_float(type_, found[i]), sum.whole, bound,
                 sum.outcome.then(Outcome::rounded(sum.whole, bound, overflow_threshold(type_))));
    }
    return result;
  }

 private:
  struct Sum {
    double whole = 0, magnitude = 0, nodes = 0;  ///< C, sum |x_r|, sum |Q_n|
    double node = 0, node_magnitude = 0;
    Outcome outcome = Outcome::finite(), node_outcome = Outcome::finite();
  };

  void close_node(Sum& sum) const {
    if (rounds_nodes_) {
      const double v = unit_roundoff(type_);
      const double error =
          v * std::fabs(sum.node) + kUnitRoundoffFp32 * locals_ * sum.node_magnitude;
      sum.node_outcome =
          sum.node_outcome.then(Outcome::rounded(sum.node, error, overflow_threshold(type_)));
    }
    if (sum.node_magnitude >= kOverflowFp32) sum.node_outcome = Outcome::anything();
    sum.outcome = sum.outcome + sum.node_outcome;
    sum.whole += sum.node;
    sum.magnitude += sum.node_magnitude;
    sum.nodes += std::fabs(sum.node);
    sum.node = sum.node_magnitude = 0;
    sum.node_outcome = Outcome::finite();
  }

  std::uint32_t nodes_, locals_;
  DataType type_;
  bool rounds_nodes_;
  std::uint32_t ranks_ = 0;
  std::vector<Sum> sums_;
};

}  // namespace mk::tools
