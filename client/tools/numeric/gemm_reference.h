/// \file
/// What a GEMM summed over ranks must give, in float64, with a bound for every element:
/// GEMM+AllReduce, the rows of a GEMM+ReduceScatter, and, as a world of one rank, AllGather+GEMM or
/// any single product.
///
/// C = sum over nodes n of Q_n, Q_n = sum over n's ranks r of P_r, P_r = A_r B_r. The operator sums
/// P_r in fp32 (any order; error at most g(K_r) S_r with g(k) = k u / (1 - k u), u = 2^-24, and S_r
/// = sum |a||b| <= K_r amax bmax: Higham, "Accuracy and Stability of Numerical Algorithms", 2nd
/// ed., section 3.1), and rounds each P_r to the element type (unit roundoff v = 2^-8 for bf16,
/// 2^-11 for f16). With L > 1 ranks a node it adds L partials in fp32 and rounds each Q_n; with N >
/// 1 nodes it adds N node sums in fp32 and rounds C. Hence, to first order,
///
///   |error| <= sum_r g(K_r) S_r + v sum_r |P_r|
///              + [L > 1] (v sum_n |Q_n| + u L sum_r |P_r|)
///              + [N > 1] (v |C| + u N sum_n |Q_n|)
///
/// and the second-order terms, products of the above with v, are covered by a factor of 1 + 4 v.
/// f16 adds half of its smallest unit, 2^-25, per rounding. With partials in fp32 the terms with v
/// but the last, v |C|, are not there, and that one always is.
///
/// Bias and activation come before the last rounding. The sum's error E, without that rounding,
/// grows to q E + a: kernels/ops/gemm_ar/README.md has the slopes q and the activations' own errors
/// a, of which this takes the larger one of the executors.
///
/// Infinities and NaNs follow the same roundings: a P_r or Q_n whose magnitude reaches the type's
/// overflow threshold (65520 for f16) becomes an infinity, and infinities of unlike sign add up to
/// a NaN. Where the error decides whether it does, either is right. So is anything where fp32
/// itself may overflow on the way, S_r >= 2^128, and what an activation makes of an infinity.
#pragma once

#include <cstdint>
#include <vector>

#include "client/tools/numeric/comparison.h"
#include "client/tools/numeric/elements.h"

namespace mk::tools {

/// Threads for one of so many ranks of this machine, all of which check at once.
std::uint32_t share_of_cores(std::uint32_t ranks);

/// Accumulates the reference rank by rank (node-major order), so that only one rank's inputs are in
/// memory at a time.
class GemmReference {
 public:
  GemmReference(std::uint64_t rows, std::uint64_t n, std::uint32_t nodes, std::uint32_t locals,
                DataType type, Partials partials = Partials::kElement);

  /// So many multiply, each some of the rows; without it one.
  void use_threads(std::uint32_t count) { threads_ = count; }

  /// Adds the next rank's product: `a` is rows x k, `b` is k x n, both row-major; all finite
  /// elements lie within +-range.
  void add_rank(const std::uint16_t* a, const std::uint16_t* b, std::uint64_t k, double range_a,
                double range_b);

  /// What becomes of the sum. `bias`: n elements, or none.
  void finish(Activation activation, std::vector<std::uint16_t> bias);

  /// After all ranks: compares every element of `c`, rows x n (gated: n / 2), row-major. Indices
  /// count row * n + column of the sum; gated: of the gate.
  Comparison compare(const std::uint16_t* c) const;
  double expected(std::uint64_t index) const { return result(index).exact; }
  double bound(std::uint64_t index) const { return result(index).error; }
  /// Whether element `index` is finite, an infinity or a NaN.
  Outcome outcome(std::uint64_t index) const;

 private:
  /// A number, and how far the computed one may be from it.
  struct Bounded {
    double exact = 0;
    double error = 0;
  };
  /// Before its last rounding.
  Bounded total(std::uint64_t index) const;
  Bounded activated(const Bounded& gate, const Bounded& up) const;
  Bounded result(std::uint64_t index) const;
  bool finishes() const { return activation_ != Activation::kNone || !bias_.empty(); }
  /// Whether partial sums are rounded to the element type.
  bool rounds_partials() const { return partials_ == Partials::kElement && nodes_ * locals_ > 1; }
  double partial_threshold() const;

  struct Factors;
  void add_rows(const std::uint16_t* a, const Factors& b, std::uint64_t k, std::uint64_t first,
                std::uint64_t end);
  void become_careful();
  void follow_partials(double gamma, bool may_overflow_fp32);
  void close_node();

  std::uint64_t rows_, n_;
  std::uint32_t nodes_, locals_;
  DataType type_;
  Partials partials_;
  Activation activation_ = Activation::kNone;
  std::vector<std::uint16_t> bias_;
  std::uint32_t ranks_ = 0;
  std::uint32_t threads_ = 1;
  double accumulation_ = 0;          ///< sum of g(K_r) S_r
  std::vector<double> sum_;          ///< C
  std::vector<double> node_;         ///< Q_n of the node being added
  std::vector<double> magnitude_p_;  ///< sum |P_r|
  std::vector<double> magnitude_q_;  ///< sum |Q_n|

  // Kinds other than finite are followed from the first rank on whose partials may have some.
  bool careful_ = false;
  double largest_possible_ = 0;         ///< of any sum so far
  std::vector<double> product_;         ///< P_r
  std::vector<double> product_terms_;   ///< S_r
  std::vector<double> node_error_;      ///< of the node being added: sum of g(K_r) S_r
  std::vector<double> node_magnitude_;  ///< sum |P_r|
  std::vector<Outcome> node_outcome_;   ///< of the sum of its rounded P_r
  std::vector<Outcome> sum_outcome_;    ///< of the sum of the rounded Q_n
};

}  // namespace mk::tools
