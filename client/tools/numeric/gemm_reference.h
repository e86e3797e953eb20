/// \file
/// What a GEMM summed over ranks must give, in float64, with a bound for every element:
/// GEMM+AllReduce, the rows of a GEMM+ReduceScatter, and, as a world of one rank, AllGather+GEMM or
/// any single product.
///
/// C = sum over nodes n of Q_n, Q_n = sum over n's ranks r of P_r, P_r = A_r B_r. The operator sums
/// P_r in fp32 (any order; error at most D_r, see below), and rounds each P_r to the element type
/// (unit roundoff v = 2^-8 for bf16, 2^-11 for f16). With L > 1 ranks a node it adds L partials in
/// fp32 (u = 2^-24) and rounds each Q_n; with N > 1 nodes it adds N node sums in fp32 and rounds C.
/// Hence, to first order,
///
///   |error| <= sum_r D_r + v sum_r |P_r|
///              + [L > 1] (v sum_n |Q_n| + u L sum_r |P_r|)
///              + [N > 1] (v |C| + u N sum_n |Q_n|)
///
/// and the second-order terms, products of the above with v, are covered by a factor of 1 + 4 v.
/// f16 adds half of its smallest unit, 2^-25, per rounding, bf16 2^-126 per product. With partials
/// in fp32 the terms with v but the last, v |C|, are not there, and that one always is.
///
/// **D, of a sum of k products.** Each addition is off by at most u times its own result. So the
/// sum is off, in any order, by at most u times the magnitudes of its k - 1 intermediate sums
/// together (Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., section 4.2), to
/// first order. A factor 1 / (1 - k u) covers the rest: g(k) = k u / (1 - k u). D is the less of
/// these two:
///
///   1. No intermediate sum is above S = sum |a||b| <= |a|_2 |b|_2: g S. That grows with k^2, and
///      at k = 16384 has room for some steps of the sum that are missing.
///   2. Signs know nothing of the order of the additions. Then intermediate sums are random walks
///      about the straight way to P. They are sub-Gaussian, with the variance Q = sum a^2 b^2 at
///      most, Q <= (|a|_4 |b|_4)^2. By Jensen's inequality so is X, the mean of their magnitudes:
///      P(X >= w sqrt(Q)) <= 7 exp(-0.49 w^2), which is 4e-21 at w = 10. So it is
///      g (|P| + 10 |a|_4 |b|_4), which grows with k^1.5.
///
/// The second is like Higham's and Mary's "Sharper probabilistic backward error analysis for basic
/// linear algebra kernels with random data" (SISC 42(5), 2020), but takes each rounding at its
/// worst: tensor cores truncate. Whatever the inputs, it holds where roundings are random: their
/// sum is at most 10 u sqrt(k) S <= 10 u k |a|_4 |b|_4 ("A new approach to probabilistic rounding
/// error analysis", SISC 41(5), 2019).
///
/// **The mean square** (random_inputs) finds what is left. In the mean over random signs the square
/// of that error is at most (g |a|_4 |b|_4)^2. Later roundings are off by something of mean 0 that
/// does not depend on the rest. So squares add up:
///
///   mean error^2 <= (sum_r g(K_r) |a_r|_4 |b_r|_4 + the terms with u)^2
///                   + v^2 (sum_r P_r^2 + [L > 1 and N > 1] sum_n Q_n^2 + C^2)
///
/// Rounding errors are uniform, and their mean square a third of the largest. That leaves the last
/// term head-room of three for what samples vary. The first has that of a worst case.
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

/// A sum of random signs is at most so much, over the root of its terms' squares.
inline constexpr double kWidest = 10;
/// The magnitude, the less of the two above, that intermediate sums of a sum P of products do not
/// exceed in the mean. `magnitudes`, `squares`: the sums of |a||b| and of a^2 b^2.
double sum_size(double p, double magnitudes, double squares);

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

  /// The inputs have signs like coin tosses, as RandomMatrix has: compare() judges the mean, too.
  void random_inputs() { random_ = true; }

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
  /// A number, how far the computed one may be from it, and the root of its mean square error.
  struct Bounded {
    double exact = 0;
    double error = 0;
    double spread = 0;
  };
  /// One rank's product has them.
  struct Norms {
    double gamma = 0;
    std::vector<double> a2, a4;  ///< of A's rows: |a|_2, |a|_4
    std::vector<double> b2, b4;  ///< of B's columns
  };
  /// One element's, over all ranks' products: the bound by magnitudes and that by random signs.
  struct Accumulation {
    double worst = 0;
    double random = 0;
  };
  Accumulation accumulation(std::uint64_t index) const;
  /// Before its last rounding.
  Bounded total(std::uint64_t index) const;
  double moved(const Bounded& gate, const Bounded& up, double Bounded::*error) const;
  Bounded activated(const Bounded& gate, const Bounded& up) const;
  Bounded result(std::uint64_t index) const;
  bool finishes() const { return activation_ != Activation::kNone || !bias_.empty(); }
  /// Whether partial sums are rounded to the element type.
  bool rounds_partials() const { return partials_ == Partials::kElement && nodes_ * locals_ > 1; }
  double partial_threshold() const;

  struct Factors;
  void add_rows(const std::uint16_t* a, const Factors& b, std::uint64_t k, std::uint64_t first,
                std::uint64_t end);
  void add_norms(const std::uint16_t* a, const Factors& b, std::uint64_t k, double gamma);
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
  bool random_ = false;
  std::vector<Norms> norms_;         ///< by rank
  double gamma_max_ = 0;             ///< the largest g(K_r)
  double flushed_ = 0;               ///< what may be lost where instructions flush subnormals
  std::vector<double> sum_;          ///< C
  std::vector<double> node_;         ///< Q_n of the node being added
  std::vector<double> magnitude_p_;  ///< sum |P_r|
  std::vector<double> magnitude_q_;  ///< sum |Q_n|
  std::vector<double> squares_;      ///< of what is rounded before C: sum P_r^2 + sum Q_n^2

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
