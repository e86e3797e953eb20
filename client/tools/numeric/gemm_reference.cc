#include "client/tools/numeric/gemm_reference.h"

#include <algorithm>
#include <cmath>
#include <thread>
#include <utility>

namespace mk::tools {
namespace {

/// row += a_row b in float64: one row of C; the inner loop runs along a row of B and C.
[[gnu::always_inline]] inline void add_product(const double* a_row, const double* b,
                                               std::uint64_t k, std::uint64_t n,
                                               double* __restrict row) {
  constexpr std::uint64_t kColumns =
      512;  // of B at a time, so that a block of k rows stays in the cache
  for (std::uint64_t first = 0; first < n; first += kColumns) {
    const std::uint64_t last = std::min(n, first + kColumns);
    for (std::uint64_t i = 0; i < k; ++i) {
      const double factor = a_row[i];
      const double* b_row = b + i * n;
      for (std::uint64_t j = first; j < last; ++j) row[j] += factor * b_row[j];
    }
  }
}

// The same loop for three widths of vector. Not target_clones: its resolver runs before the
// sanitizers' functions can be called.
using AddProduct = void (*)(const double*, const double*, std::uint64_t, std::uint64_t, double*);
[[gnu::target("avx512f")]] void add_product_avx512(const double* a_row, const double* b,
                                                   std::uint64_t k, std::uint64_t n, double* row) {
  add_product(a_row, b, k, n, row);
}
[[gnu::target("avx2")]] void add_product_avx2(const double* a_row, const double* b, std::uint64_t k,
                                              std::uint64_t n, double* row) {
  add_product(a_row, b, k, n, row);
}
void add_product_plain(const double* a_row, const double* b, std::uint64_t k, std::uint64_t n,
                       double* row) {
  add_product(a_row, b, k, n, row);
}

double half_smallest_unit(DataType type) {
  return std::ldexp(1.0, type == DataType::kF16 ? -25 : -134);
}

bool all_finite(const std::uint16_t* elements, std::uint64_t count, DataType type) {
  const unsigned exponent = type == DataType::kBf16 ? 0x7f80 : 0x7c00;
  return std::all_of(elements, elements + count,
                     [exponent](std::uint16_t bits) { return (bits & exponent) != exponent; });
}

/// One row's or column's, over its finite elements.
struct NormSums {
  double square = 0, fourth = 0;
  void add(double element) {
    if (!std::isfinite(element)) return;
    square += element * element;
    fourth += element * element * element * element;
  }
};
void roots_of(const std::vector<NormSums>& sums, std::vector<double>* norm2,
              std::vector<double>* norm4) {
  for (const NormSums& sum : sums) {
    norm2->push_back(std::sqrt(sum.square));
    norm4->push_back(std::sqrt(std::sqrt(sum.fourth)));
  }
}

double silu_of(double x) { return x / (1 + std::exp(-x)); }

AddProduct widest_add_product() {
  if (__builtin_cpu_supports("avx512f")) return add_product_avx512;
  if (__builtin_cpu_supports("avx2")) return add_product_avx2;
  return add_product_plain;
}

}  // namespace

std::uint32_t share_of_cores(std::uint32_t ranks) {
  return std::max(1u, std::thread::hardware_concurrency() / std::max(1u, ranks));
}

double sum_size(double p, double magnitudes, double squares) {
  return std::min(magnitudes, std::fabs(p) + kWidest * std::sqrt(squares));
}

GemmReference::GemmReference(std::uint64_t rows, std::uint64_t n, std::uint32_t nodes,
                             std::uint32_t locals, DataType type, Partials partials)
    : rows_(rows),
      n_(n),
      nodes_(nodes),
      locals_(locals),
      type_(type),
      partials_(partials),
      sum_(rows * n),
      node_(rows * n),
      magnitude_p_(rows * n),
      magnitude_q_(rows * n),
      squares_(rounds_partials() ? rows * n : 0) {}

/// B in float64, and its magnitudes where they are wanted.
struct GemmReference::Factors {
  std::vector<double> values;
  std::vector<double> magnitudes;
};

void GemmReference::add_rank(const std::uint16_t* a, const std::uint16_t* b, std::uint64_t k,
                             double range_a, double range_b) {
  const double gamma = fp32_error(static_cast<double>(k));
  const double terms = static_cast<double>(k) * range_a * range_b;
  largest_possible_ += terms;
  if (!careful_ && (largest_possible_ >= overflow_threshold(type_) / 2 ||
                    !all_finite(a, rows_ * k, type_) || !all_finite(b, k * n_, type_))) {
    become_careful();
  }
  Factors wide;
  wide.values.resize(k * n_);
  for (std::uint64_t i = 0; i < k * n_; ++i) wide.values[i] = to_float(type_, b[i]);
  if (careful_) {
    wide.magnitudes.resize(k * n_);
    for (std::uint64_t i = 0; i < k * n_; ++i) wide.magnitudes[i] = std::fabs(wide.values[i]);
  }
  const std::uint64_t each = (rows_ + threads_ - 1) / threads_;
  {
    std::vector<std::jthread> others;
    for (std::uint64_t first = each; first < rows_; first += each) {
      others.emplace_back(
          [&, first] { add_rows(a, wide, k, first, std::min(rows_, first + each)); });
    }
    add_rows(a, wide, k, 0, std::min(rows_, each));
  }
  add_norms(a, wide, k, gamma);
  if (careful_) follow_partials(gamma, terms >= kOverflowFp32);
  if (++ranks_ % locals_ == 0) close_node();
}

void GemmReference::add_norms(const std::uint16_t* a, const Factors& b, std::uint64_t k,
                              double gamma) {
  std::vector<NormSums> rows(rows_), columns(n_);
  for (std::uint64_t row = 0; row < rows_; ++row)
    for (std::uint64_t i = 0; i < k; ++i) rows[row].add(to_float(type_, a[row * k + i]));
  for (std::uint64_t i = 0; i < k; ++i)
    for (std::uint64_t j = 0; j < n_; ++j) columns[j].add(b.values[i * n_ + j]);
  Norms& norms = norms_.emplace_back();
  norms.gamma = gamma;
  roots_of(rows, &norms.a2, &norms.a4);
  roots_of(columns, &norms.b2, &norms.b4);
  gamma_max_ = std::max(gamma_max_, gamma);
  if (type_ == DataType::kBf16) flushed_ += static_cast<double>(k) * 0x1p-126;
}

void GemmReference::add_rows(const std::uint16_t* a, const Factors& b, std::uint64_t k,
                             std::uint64_t first, std::uint64_t end) {
  const AddProduct add_row_product = widest_add_product();
  std::vector<double> a_row(k);
  std::vector<double> product(n_);
  for (std::uint64_t row = first; row < end; ++row) {
    for (std::uint64_t i = 0; i < k; ++i) a_row[i] = to_float(type_, a[row * k + i]);
    std::fill(product.begin(), product.end(), 0.0);
    add_row_product(a_row.data(), b.values.data(), k, n_, product.data());
    for (std::uint64_t j = 0; j < n_; ++j) {
      node_[row * n_ + j] += product[j];
      magnitude_p_[row * n_ + j] += std::fabs(product[j]);
    }
    for (std::uint64_t j = 0; j < n_ && !squares_.empty(); ++j)
      squares_[row * n_ + j] += product[j] * product[j];
    if (!careful_) continue;
    std::copy(product.begin(), product.end(), product_.data() + row * n_);
    for (double& element : a_row) element = std::fabs(element);
    std::fill(product.begin(), product.end(), 0.0);
    add_row_product(a_row.data(), b.magnitudes.data(), k, n_, product.data());
    std::copy(product.begin(), product.end(), product_terms_.data() + row * n_);
  }
}

/// What was added so far is finite, and so are its roundings.
void GemmReference::become_careful() {
  careful_ = true;
  product_.resize(rows_ * n_);
  product_terms_.resize(rows_ * n_);
  node_error_.resize(rows_ * n_);
  for (std::uint64_t i = 0; i < rows_ * n_; ++i) node_error_[i] = accumulation(i).worst;
  node_magnitude_ = magnitude_p_;
  node_outcome_.assign(rows_ * n_, Outcome::finite());
  sum_outcome_.assign(rows_ * n_, Outcome::finite());
}

/// Takes the kinds of P_r into those of its node's sum. `may_overflow_fp32`: some S_r may.
void GemmReference::follow_partials(double gamma, bool may_overflow_fp32) {
  const double threshold = partial_threshold();
  for (std::uint64_t i = 0; i < rows_ * n_; ++i) {
    const double product = product_[i];
    Outcome partial = Outcome::rounded(product, gamma * product_terms_[i], threshold);
    if (std::isfinite(product)) {
      if (product_terms_[i] >= kOverflowFp32) partial = Outcome::anything();
      node_error_[i] += gamma * product_terms_[i];
      node_magnitude_[i] += std::fabs(product);
    } else if (std::isinf(product) && may_overflow_fp32) {
      partial = partial | Outcome::nan();  // what is finite of it may overflow the other way
    }
    node_outcome_[i] = node_outcome_[i] + partial;
  }
}

double GemmReference::partial_threshold() const {
  return rounds_partials() ? overflow_threshold(type_) : kOverflowFp32;
}

void GemmReference::finish(Activation activation, std::vector<std::uint16_t> bias) {
  activation_ = activation;
  bias_ = std::move(bias);
}

void GemmReference::close_node() {
  const double v = unit_roundoff(type_);
  for (std::uint64_t i = 0; careful_ && i < rows_ * n_; ++i) {
    Outcome sum = node_outcome_[i];
    if (locals_ > 1) {
      const double error =
          node_error_[i] + (v + kUnitRoundoffFp32 * locals_) * (1 + 4 * v) * node_magnitude_[i];
      sum = sum.then(Outcome::rounded(node_[i], error, partial_threshold()));
      if (node_magnitude_[i] >= kOverflowFp32) sum = sum.then(Outcome::anything());
    }
    sum_outcome_[i] = sum_outcome_[i] + sum;
    node_error_[i] = 0;
    node_magnitude_[i] = 0;
    node_outcome_[i] = Outcome::finite();
  }
  for (std::uint64_t i = 0; i < rows_ * n_; ++i) {
    if (rounds_partials() && locals_ > 1 && nodes_ > 1) squares_[i] += node_[i] * node_[i];
    sum_[i] += node_[i];
    magnitude_q_[i] += std::fabs(node_[i]);
    node_[i] = 0;
  }
}

Outcome GemmReference::outcome(std::uint64_t i) const {
  if (!careful_) return Outcome::finite();
  const bool overflows = magnitude_q_[i] >= kOverflowFp32 || !std::isfinite(sum_[i]);
  if (finishes() && (overflows || !(sum_outcome_[i] == Outcome::finite())))
    return Outcome::anything();
  const Outcome sum = sum_outcome_[i];
  if (magnitude_q_[i] >= kOverflowFp32) return sum.then(Outcome::anything());
  const Bounded rounded = result(i);
  return sum.then(Outcome::rounded(rounded.exact, rounded.error, overflow_threshold(type_)));
}

GemmReference::Accumulation GemmReference::accumulation(std::uint64_t i) const {
  Accumulation all;
  for (const Norms& rank : norms_) {
    all.worst += rank.gamma * rank.a2[i / n_] * rank.b2[i % n_];
    all.random += rank.gamma * rank.a4[i / n_] * rank.b4[i % n_];
  }
  return all;
}

GemmReference::Bounded GemmReference::total(std::uint64_t i) const {
  const double v = unit_roundoff(type_);
  const Accumulation products = accumulation(i);
  double rounded = 0;
  double roundings = 0;
  if (rounds_partials()) {
    rounded += v * magnitude_p_[i];
    roundings += nodes_ * locals_;
  }
  double added = 0;
  if (locals_ > 1) added += kUnitRoundoffFp32 * locals_ * magnitude_p_[i];
  if (rounds_partials() && locals_ > 1 && nodes_ > 1) {
    rounded += v * magnitude_q_[i];
    roundings += nodes_;
  }
  if (nodes_ > 1) added += kUnitRoundoffFp32 * nodes_ * magnitude_q_[i];
  const double first_order =
      std::min(products.worst, gamma_max_ * magnitude_p_[i] + kWidest * products.random) + rounded +
      added;
  const double tiny = half_smallest_unit(type_) * roundings + flushed_;
  Bounded sum{
      sum_[i], first_order * (1 + 4 * v) + tiny,
      std::hypot(products.random + added, v * std::sqrt(squares_.empty() ? 0 : squares_[i])) *
              (1 + 4 * v) +
          tiny};
  if (!bias_.empty()) {
    sum.exact += to_float(type_, bias_[i % n_]);
    sum.error += kUnitRoundoffFp32 * (std::fabs(sum.exact) + sum.error);
    sum.spread += kUnitRoundoffFp32 * (std::fabs(sum.exact) + sum.spread);
  }
  return sum;
}

/// The error (a bound of it, or its spread) of what becomes of sums, from theirs.
double GemmReference::moved(const Bounded& gate, const Bounded& up, double Bounded::*error) const {
  constexpr double kGeluSlope = 1.13;
  constexpr double kSiluSlope = 1.1;
  const double reach = std::fabs(gate.exact) + gate.*error;
  const double silu = silu_of(gate.exact);
  const double silu_moved = kSiluSlope * gate.*error;
  const double silu_error =
      silu_moved + std::ldexp(8 + 1.2 * reach, -23) * (std::fabs(silu) + silu_moved);
  switch (activation_) {
    case Activation::kNone:
    case Activation::kRelu:
      break;
    case Activation::kGelu:
      return kGeluSlope * gate.*error + std::ldexp(reach, -20);
    case Activation::kSilu:
      return silu_error;
    case Activation::kGatedSilu: {
      const double both =
          silu_error * (std::fabs(up.exact) + up.*error) + std::fabs(silu) * up.*error;
      return both + kUnitRoundoffFp32 * (std::fabs(silu * up.exact) + both);
    }
  }
  return gate.*error;
}

GemmReference::Bounded GemmReference::activated(const Bounded& gate, const Bounded& up) const {
  const double x = gate.exact;
  Bounded result{x, moved(gate, up, &Bounded::error), moved(gate, up, &Bounded::spread)};
  switch (activation_) {
    case Activation::kNone:
      break;
    case Activation::kRelu:
      result.exact = std::max(x, 0.0);
      break;
    case Activation::kGelu:
      result.exact = x * std::erfc(-x / std::sqrt(2.0)) / 2;
      break;
    case Activation::kSilu:
      result.exact = silu_of(x);
      break;
    case Activation::kGatedSilu:
      result.exact = silu_of(x) * up.exact;
      break;
  }
  return result;
}

GemmReference::Bounded GemmReference::result(std::uint64_t i) const {
  const double v = unit_roundoff(type_);
  Bounded sum = total(i);
  if (activation_ != Activation::kNone)
    sum = activated(sum, activation_ == Activation::kGatedSilu ? total(i + 1) : sum);
  sum.error += v * (std::fabs(sum.exact) + sum.error) + half_smallest_unit(type_);
  sum.spread = std::hypot(sum.spread, v * sum.exact) * (1 + 4 * v) + half_smallest_unit(type_);
  return sum;
}

Comparison GemmReference::compare(const std::uint16_t* c) const {
  Comparison result;
  const std::uint64_t step = activation_ == Activation::kGatedSilu ? 2 : 1;
  for (std::uint64_t i = 0; i < rows_ * n_; i += step) {
    const Bounded expected = this->result(i);
    result.add(i, to_float(type_, c[i / step]), expected.exact, expected.error, outcome(i),
               random_ ? expected.spread * expected.spread : 0);
  }
  result.judge_mean();
  return result;
}

}  // namespace mk::tools
